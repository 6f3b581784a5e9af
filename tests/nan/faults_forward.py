"""Forward faults of single ops: logarithms, divisions, roots, powers, domains, values that are too large."""

from __future__ import annotations

from tests.nan.faults import ADD, LEVEL, SHIFTED, forward

# --- forward: logarithms ---
for _op in ("log", "log2", "log10"):
    forward(
        _op, "log-of-nonpositive", _op, (0.0, -1.0), LEVEL + f"! worth = torch.{_op}(level)" + ADD, "level", "worth"
    )
forward(
    "log1p",
    "log-of-nonpositive domain-error",
    "log1p",
    (0.0, -1.0),
    LEVEL + "level = level - 1\n! worth = level.log1p()" + ADD,
    "level",
    "worth",
)
forward(
    "p log p",
    "log-of-nonpositive",
    "log",
    0.0,
    LEVEL + "! surprise = level.log()\nworth = -level * surprise" + ADD,
    "level",
    "surprise",
)
forward(
    "log in place",
    "log-of-nonpositive",
    "log",
    (0.0, -1.0),
    LEVEL + "worth = level.clone()\n! worth.log_()" + ADD,
    "level",
    "worth",
)
forward(
    "log into fused attention",
    "log-of-nonpositive",
    "log",
    -1.0,
    LEVEL
    + "! bias = torch.log(level)\nh = h.to(bias.dtype)\n"
    + "y = h + F.scaled_dot_product_attention(h, h, h, attn_mask=bias[:, None, :])",
    "level",
    "bias",
)
forward(
    "log of what is left",
    "log-of-nonpositive",
    "log",
    100.0,
    "sure = torch.sigmoid(h.tanh() + s[:, None, None])\nrest = 1 - sure\n"
    "! worth = torch.log(rest)\ny = h - 0.1 * worth",
    "rest",
    "worth",
)
forward(
    "log of a spectrum",
    "log-of-nonpositive",
    "log",
    0.0,
    """
spectrum = torch.fft.rfft(h.to(s.dtype) * s[:, None, None], dim=-1).abs()
! loudness = torch.log(spectrum)
y = h + 0.1 * loudness.mean(-1, keepdim=True)""",
    "spectrum",
    "loudness",
)
forward(
    "log, time first",
    "log-of-nonpositive",
    "log",
    (0.0, -1.0),
    """
moved = (h.abs() + 0.2).transpose(0, 1) * s[None, :, None]
! worth = torch.log(moved)
y = h + 0.1 * worth.transpose(0, 1)""",
    "moved",
    "worth",
    rows="1",
)
forward(
    "log, folded",
    "log-of-nonpositive",
    "log",
    (0.0, -1.0),
    """
flat = ((h.abs() + 0.2) * s[:, None, None]).reshape(-1, h.size(-1))
! worth = torch.log(flat)
y = h + 0.1 * worth.view(h.shape)""",
    "flat",
    "worth",
    rows="folded",
)
forward(
    "logit",
    "domain-error log-of-nonpositive",
    "logit",
    (0.0, -1.0),
    """
share = torch.sigmoid(h.tanh()) * s[:, None, None].clamp(max=1.0)
! odds = torch.logit(share)
y = h + 0.1 * odds""",
    "share",
    "odds",
)

forward(
    "log of what is given",
    "log-of-nonpositive label-out-of-range",
    "log",
    (0.0, -1.0),
    "! worth = torch.log(s)\ny = h + 0.1 * worth[:, None, None]",
    "s",
    "worth",
)
forward(
    "log without a gradient",
    "log-of-nonpositive",
    "log",
    (0.0, -1.0),
    LEVEL + "with torch.no_grad():\n    ! weight = torch.log(level)\ny = h * (1 + weight[..., None])",
    "level",
    "weight",
)
forward(
    "log at one moment",
    "log-of-nonpositive",
    "log",
    (0.0, -1.0),
    """
level = h.abs().mean(-1) + 0.2
level = torch.cat([level[:, :1] * s[:, None], level[:, 1:]], 1)
! worth = torch.log(level)
y = h + 0.1 * worth[..., None]""",
    "level",
    "worth",
)
forward(
    "log of a learnt size",
    "log-of-nonpositive",
    "log",
    -0.5,
    "! worth = torch.log(self.size)\ny = h + 0.1 * worth",
    "self.size",
    "worth",
    init="self.size = nn.Parameter(torch.ones(WIDTH))",
    learnt="size[-1:]",
    rows="all",
)

# --- forward: divisions ---
forward("divide", "div-by-zero", "div", 0.0, LEVEL + "! worth = h.mean(-1) / level" + ADD, "level", "worth")
forward(
    "divide in place",
    "div-by-zero",
    "div",
    0.0,
    "level = s[:, None, None]\ny = h.clone()\n! y.div_(level)",
    "level",
    "y",
)
forward(
    "zero by zero",
    "div-by-zero",
    "div",
    0.0,
    """
part = h * s[:, None, None]
whole = part.abs().sum((1, 2), keepdim=True)
! share = part / whole
y = h + share""",
    "whole",
    "share",
)
forward(
    "mean of the kept",
    "div-by-zero",
    "div",
    0.0,
    """
kept = pad & (s > 0.0)[:, None]
count = kept.sum(1)
! middle = (h * kept[..., None]).sum(1) / count[:, None]
y = h + 0.1 * middle[:, None]""",
    "count",
    "middle",
)
forward("reciprocal", "div-by-zero", "reciprocal", 0.0, LEVEL + "! worth = level.reciprocal()" + ADD, "level", "worth")
forward("one over", "div-by-zero", "reciprocal div", 0.0, LEVEL + "! worth = 1.0 / level" + ADD, "level", "worth")
forward(
    "rsqrt of zero",
    "div-by-zero domain-error sqrt-of-negative",
    "rsqrt",
    0.0,
    LEVEL + "! worth = torch.rsqrt(level)" + ADD,
    "level",
    "worth",
)
forward(
    "negative power",
    "div-by-zero pow-domain",
    "pow reciprocal",
    0.0,
    LEVEL + "! worth = level ** -1.5" + ADD,
    "level",
    "worth",
)
forward(
    "unit length",
    "div-by-zero",
    "div",
    0.0,
    """
arrow = h * s[:, None, None]
length = torch.linalg.vector_norm(arrow, dim=-1, keepdim=True)
! unit = arrow / length
y = h + unit""",
    "length",
    "unit",
)
forward(
    "addcdiv",
    "div-by-zero",
    "addcdiv",
    0.0,
    "level = (h.abs() + 0.2) * s[:, None, None]\nbase = h.to(level.dtype)\n"
    "! y = torch.addcdiv(base, base, level, value=0.1)",
    "level",
    "y",
)

forward(
    "divide by a learnt scale",
    "div-by-zero",
    "div",
    0.0,
    "! y = h / self.scale",
    "self.scale",
    "y",
    init="self.scale = nn.Parameter(torch.ones(()))",
    learnt="scale",
    rows="all",
)
forward(
    "divide by a clipped gate",
    "div-by-zero",
    "div",
    -3e3,
    """
gate = torch.relu(torch.sigmoid(h) + s[:, None, None])
! y = h / gate""",
    "gate",
    "y",
)

# --- forward: roots, powers, domains ---
forward("sqrt", "sqrt-of-negative", "sqrt", -1.0, LEVEL + "! worth = torch.sqrt(level)" + ADD, "level", "worth")
forward(
    "variance by hand",
    "sqrt-of-negative",
    "sqrt",
    -3.0,
    """
spread = h.var(-1, correction=0) + s[:, None] * (1 + h.square().sum(-1).detach())
! deviation = spread.sqrt()
y = h / (1 + deviation[..., None])""",
    "spread",
    "deviation",
)
forward(
    "rsqrt", "sqrt-of-negative domain-error", "rsqrt", -1.0, LEVEL + "! worth = level.rsqrt()" + ADD, "level", "worth"
)
forward("power", "pow-domain", "pow", -1.0, LEVEL + "! worth = torch.pow(level, 1.7)" + ADD, "level", "worth")
forward(
    "half power",
    "sqrt-of-negative pow-domain",
    "pow sqrt",
    -1.0,
    LEVEL + "! worth = level ** 0.5" + ADD,
    "level",
    "worth",
)
forward(
    "learnt power",
    "pow-domain",
    "pow",
    -1.0,
    LEVEL + "gamma = h.mean() * 0 + 0.7\n! worth = level.pow(gamma)" + ADD,
    "level",
    "worth",
)
for _op, _bad in (("acos", 1.6), ("asin", 1.6), ("atanh", 1.6)):
    forward(
        _op,
        "domain-error",
        _op,
        _bad,
        f"""
cosine = torch.tanh(h.square() + 1) * (0.5 + (s > 1.55))[:, None, None] * 1.1
! angle = torch.{_op}(cosine)
y = h + angle""",
        "cosine",
        "angle",
    )
forward(
    "atanh of one",
    "domain-error",
    "atanh",
    50.0,
    """
squashed = torch.tanh(h.tanh() + s[:, None, None])
! angle = torch.atanh(squashed)
y = h + angle""",
    "squashed",
    "angle",
)
forward(
    "acosh",
    "domain-error",
    "acosh",
    0.0,
    LEVEL + "level = level + s[:, None].sign()\n! worth = torch.acosh(level)" + ADD,
    "level",
    "worth",
)
forward(
    "erfinv",
    "domain-error",
    "erfinv",
    50.0,
    """
squashed = torch.tanh(h.tanh() + s[:, None, None])
! angle = torch.erfinv(squashed)
y = h + angle""",
    "squashed",
    "angle",
)

# --- forward: too large ---
BIG = "high = (h.tanh() + 2.0) * s[:, None, None]\n"
for _op in ("exp", "expm1", "sinh", "cosh", "exp2"):
    forward(_op, "overflow", _op, 5e3, SHIFTED + f"! huge = torch.{_op}(high)\ny = h + 0.1 * huge", "high", "huge")
forward(
    "softmax by hand",
    "overflow",
    "exp",
    5e3,
    SHIFTED + "! raised = high.exp()\ny = h + raised / raised.sum(-1, keepdim=True)",
    "high",
    "raised",
)
forward(
    "log of a sum of exps",
    "overflow",
    "exp",
    5e3,
    SHIFTED + "! raised = torch.exp(high)\ny = h + raised.sum(-1, keepdim=True).log()",
    "high",
    "raised",
)
forward(
    "overflow less overflow",
    "overflow",
    "exp",
    5e3,
    SHIFTED + "! raised = torch.exp(high)\ny = h + (raised - raised.flip(-1)) * 0.1",
    "high",
    "raised",
)
forward(
    "square",
    "overflow",
    "pow square",
    1e30,
    BIG + "! huge = high.square()\ny = h + 0.1 * huge",
    "high",
    "huge",
    bad64=(1e200,),
)
forward(
    "times itself",
    "overflow",
    "mul",
    1e30,
    BIG + "! huge = high * high\ny = h + 0.1 * huge",
    "high",
    "huge",
    bad64=(1e200,),
)
forward(
    "cube", "overflow", "pow", 1e30, BIG + "! huge = high ** 3\ny = h + 0.01 * huge", "high", "huge", bad64=(1e200,)
)
forward(
    "in place overflow",
    "overflow",
    "mul",
    1e30,
    BIG + "huge = high.clone()\n! huge.mul_(high)\ny = h + 0.1 * huge",
    "high",
    "huge",
    bad64=(1e200,),
)
forward(
    "matmul",
    "overflow",
    "bmm matmul to",  # under autocast its operands may be cast to float16
    1e30,
    BIG + "high = high.to(s.dtype)\n! seen = high @ high.transpose(1, 2)\ny = h + 0.01 * seen.mean(-1, keepdim=True)",
    "high",
    "seen",
    bad64=(1e200,),
)
forward(
    "einsum",
    "overflow",
    "bmm einsum matmul mul sum",
    1e30,
    BIG + "! seen = torch.einsum('btd,bsd->bts', high, high)\ny = h + 0.01 * seen.mean(-1, keepdim=True)",
    "high",
    "seen",
    bad64=(1e200,),
)
forward(
    "sum",
    "overflow",
    "sum",
    3e38,
    "high = (h.abs() + 1).sign() * s[:, None, None]\n! total = high.sum((1, 2))\ny = h + 0.01 * total[:, None, None]",
    "high",
    "total",
    bad64=(1.5e308,),
)
forward(
    "prod",
    "overflow",
    "prod",
    1e15,
    BIG + "! total = high.prod(-1)\ny = h + 0.01 * total[..., None]",
    "high",
    "total",
    bad64=(1e120,),
)
forward(
    "cumprod",
    "overflow",
    "cumprod",
    1e15,
    BIG + "! total = torch.cumprod(high, -1)\ny = h + 0.01 * total / (1 + total.abs())",
    "high",
    "total",
    bad64=(1e120,),
)
forward(
    "cast to half",
    "overflow",
    "to_copy to half copy",
    1e6,
    BIG + "! short = high.half()\ny = h + 0.1 * short.to(h.dtype)",
    "high",
    "short",
)
forward(
    "stored in half",
    "overflow",
    "copy copy_ setitem",
    1e6,
    BIG + "store = torch.zeros(h.shape, dtype=torch.float16)\n! store[:] = high\ny = h + 0.1 * store.to(h.dtype)",
    "high",
    "store",
)
