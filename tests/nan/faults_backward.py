"""Faults of the derivative: the loss is finite, a gradient is not."""

from __future__ import annotations

from tests.nan.faults import ADD, LEVEL, SHIFTED, backward

# --- backward: roots and powers at zero ---
backward(
    "sqrt at zero", "sqrt-grad-at-zero", "sqrt", 0.0, LEVEL + "! worth = torch.sqrt(level)" + ADD, "level", "worth"
)
backward(
    "distance by hand",
    "sqrt-grad-at-zero",
    "sqrt",
    0.0,
    """
gap = (h.tanh() + 1.5) * s[:, None, None]
total = gap.square().sum(-1)
! distance = total.sqrt()
y = h + 0.1 * distance[..., None]""",
    "total",
    "distance",
)
backward(
    "half power at zero",
    "sqrt-grad-at-zero pow-domain",
    "pow sqrt",
    0.0,
    LEVEL + "! worth = level ** 0.5" + ADD,
    "level",
    "worth",
)
backward(
    "small power at zero", "pow-domain", "pow", 0.0, LEVEL + "! worth = torch.pow(level, 0.3)" + ADD, "level", "worth"
)
backward(
    "sqrt, time first",
    "sqrt-grad-at-zero",
    "sqrt",
    0.0,
    """
moved = (h.abs() + 0.2).transpose(0, 1) * s[None, :, None]
! worth = torch.sqrt(moved)
y = h + 0.1 * worth.transpose(0, 1)""",
    "moved",
    "worth",
    rows="1",
)
backward(
    "sqrt, folded",
    "sqrt-grad-at-zero",
    "sqrt",
    0.0,
    """
flat = ((h.abs() + 0.2) * s[:, None, None]).reshape(-1, h.size(-1))
! worth = torch.sqrt(flat)
y = h + 0.1 * worth.view(h.shape)""",
    "flat",
    "worth",
    rows="folded",
)
backward(
    "sqrt in place",
    "sqrt-grad-at-zero",
    "sqrt",
    0.0,
    LEVEL + "worth = level.clone()\n! worth.sqrt_()" + ADD,
    "level",
    "worth",
)

backward(
    "root of a learnt size",
    "sqrt-grad-at-zero",
    "sqrt",
    0.0,
    "! worth = self.size.sqrt()\ny = h + 0.1 * worth",
    "self.size",
    "worth",
    init="self.size = nn.Parameter(torch.ones(WIDTH))",
    learnt="size[:2]",
    rows="all",
)

# --- backward: domains, decompositions, own derivatives ---
for _op in ("acos", "asin"):
    backward(
        f"{_op} at one",
        "domain-error",
        _op,
        0.0,
        f"""
cosine = torch.tanh(h) * 0.5 * s[:, None, None] / 1.5 + (s == 0)[:, None, None]
! angle = torch.{_op}(cosine)
y = h + 0.1 * angle""",
        "cosine",
        "angle",
    )
backward(
    "acosh at one",
    "domain-error",
    "acosh",
    0.0,
    LEVEL + "level = level + 1\n! worth = torch.acosh(level)" + ADD,
    "level",
    "worth",
)
backward(
    "eigh",
    "degenerate-decomposition",
    "linalg_eigh",
    0.0,
    """
wide = h.to(s.dtype)
cover = wide.transpose(1, 2) @ wide * s[:, None, None] + torch.diag(torch.arange(h.size(-1))) * s[:, None, None]
cover = cover + torch.eye(h.size(-1), dtype=s.dtype)
! values, vectors = torch.linalg.eigh(cover)
y = h + 0.1 * (vectors * torch.arange(h.size(-1))).sum(-1)[:, None] + 0.01 * values[:, None]""",
    "cover",
    "vectors",
)
backward(
    "svd",
    "degenerate-decomposition",
    "linalg_svd svd",
    0.0,
    """
wide = h.to(s.dtype)
cover = (wide.transpose(1, 2) @ wide + torch.diag(torch.arange(h.size(-1)))) * s[:, None, None]
cover = cover + torch.eye(h.size(-1), dtype=s.dtype)
! left, values, right = torch.linalg.svd(cover)
y = h + 0.1 * (left @ right * torch.arange(h.size(-1))).sum(-1)[:, None] + 0.01 * values[:, None]""",
    "cover",
    "left",
)
backward(
    "own backward",
    "div-by-zero",
    "div",
    0.0,
    "level = (h.abs() + 0.2) * s[:, None, None]\nworth = Halve.apply(level)\ny = h + worth",
    "level",
    "halved",
    top="""
class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, level):
        ctx.save_for_backward(level)
        return level / 2

    @staticmethod
    def backward(ctx, grad):
        level, = ctx.saved_tensors
        ! halved = grad * 0.5 / level
        return halved * level
""",
)
backward(
    "own root",
    "div-by-zero sqrt-grad-at-zero domain-error sqrt-of-negative",
    "rsqrt",
    0.0,
    "level = (h.abs() + 0.2) * s[:, None, None]\nworth = OwnRoot.apply(level)\ny = h + 0.1 * worth",
    "level",
    "slope",
    top="""
class OwnRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, level):
        ctx.save_for_backward(level)
        return level.clamp(min=0).sqrt()

    @staticmethod
    def backward(ctx, grad):
        level, = ctx.saved_tensors
        ! slope = torch.rsqrt(level)
        return grad * slope / 2
""",
)
backward(
    "slope too large",
    "grad-overflow",
    "mul",
    1e25,
    """
still = h * (s < 2)[:, None, None]
scale = s[:, None, None]
! once = still * scale
twice = once * scale
y = h + 0.1 * twice""",
    "still",
    "once",
    bad64=(1e200,),
)

# --- backward: a branch that the forward drops ---
backward(
    "where, exp branch",
    "where-grad",
    "exp",
    5e3,
    """
high = h.tanh() + s[:, None, None]
! below = torch.exp(high) - 1
y = h + torch.where(high > 20, high.clamp(max=1), below)""",
    "high",
    "below",
)
backward(
    "where, log branch",
    "where-grad",
    "log",
    0.0,
    LEVEL + "! logs = torch.log(level)\nworth = torch.where(level > 0, logs, 0.0)" + ADD,
    "level",
    "logs",
)
backward(
    "where, div branch",
    "where-grad",
    "div",
    0.0,
    LEVEL + "! ratio = h.mean(-1) / level\nworth = torch.where(level > 0, ratio, torch.zeros_like(ratio))" + ADD,
    "level",
    "ratio",
)
backward(
    "where, sqrt branch",
    "where-grad",
    "sqrt",
    -1.0,
    LEVEL + "! root = level.sqrt()\nworth = torch.where(level > 0, root, 0.0)" + ADD,
    "level",
    "root",
)
backward(
    "where, sqrt of zero",
    "sqrt-grad-at-zero where-grad",
    "sqrt",
    0.0,
    LEVEL + "! root = level.sqrt()\nworth = torch.where(level > 0, root, 0.0)" + ADD,
    "level",
    "root",
)
backward(
    "masked_fill over log",
    "where-grad",
    "log",
    0.0,
    LEVEL + "! logs = level.log()\nworth = logs.masked_fill(level <= 0, 0.0)" + ADD,
    "level",
    "logs",
)
backward(
    "kept elements of log",
    "where-grad",
    "log",
    0.0,
    LEVEL + "! logs = level.log()\nworth = logs[level > 0].mean()\ny = h + 0.1 * worth",
    "level",
    "logs",
    wide=True,
)
backward(
    "nan_to_num over log",
    "where-grad log-of-nonpositive",
    "log",
    0.0,
    LEVEL + "! logs = level.log()\nworth = torch.nan_to_num(logs, nan=0.0, neginf=0.0)" + ADD,
    "level",
    "logs",
)
backward(
    "clamp over log",
    "log-of-nonpositive",
    "log",
    0.0,
    LEVEL + "! logs = level.log()\nworth = logs.clamp(min=-9.0)" + ADD,
    "level",
    "logs",
)
backward(
    "maximum over log",
    "log-of-nonpositive where-grad",
    "log",
    0.0,
    LEVEL + "! logs = level.log()\nworth = torch.maximum(logs, torch.full_like(logs, -9.0))" + ADD,
    "level",
    "logs",
)
backward(
    "clamp over exp",
    "overflow where-grad",
    "exp",
    5e3,
    SHIFTED + "! huge = high.exp()\ny = h + 0.1 * huge.clamp(max=8.0)",
    "high",
    "huge",
)
