"""The faults that a random program may hold, as text.

Each fault is a few lines of code that take `h` (rows, time, width), which needs a gradient, and `s` (rows,), one column of
what the batch brings along, and leave `y` in the shape of `h`. The line that starts with "!" is the one at fault. With
`s` between 0.5 and 1.5 all is well; where `s` has the value `bad`, that line makes a non-finite value (forward), or its
derivative is non-finite (backward) while the loss stays finite.

`operand` and `result` name what goes into the line and what comes out, so that the claim can be proven without nbdebug:
finite in, non-finite out, in the rows that were spoiled. `rows` says where the batch is: in dimension "0" or "1", "folded" with
time, or None where the fault belongs to no row.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way to go wrong. `bad` may hold several values, of which a program takes one; in double precision `bad64`."""

    name: str
    phase: str
    codes: tuple[str, ...]
    ops: tuple[str, ...]
    bad: tuple[float, ...]
    text: str
    operand: str
    result: str
    top: str = ""
    init: str = ""
    rows: str | None = "0"
    bad64: tuple[float, ...] = ()
    child: str = ""
    wide: bool = False
    """wide: works only with two rows or more in the batch that are not bad, or none is left to stay finite."""

    @property
    def mark(self) -> str:
        lines = (self.top + "\n" + self.text).splitlines()
        return next(line.strip()[1:].strip() for line in lines if line.strip().startswith("!"))


FAULTS: list[Fault] = []


def fault(name: str, phase: str, codes: str, ops: str, bad: object, text: str, operand: str, result: str, **more: object) -> None:
    """Add one; codes and ops are words, the chapter is left out."""
    values = bad if isinstance(bad, tuple) else (bad,)
    FAULTS.append(Fault(name, phase, tuple(f"nan/{c}" for c in codes.split()), tuple(ops.split()), values, text,
                        operand, result, **more))  # type: ignore[arg-type]


def _forward(name: str, codes: str, ops: str, bad: object, text: str, operand: str, result: str, **more: object) -> None:
    fault(name, "forward", codes, ops, bad, text, operand, result, **more)


def _backward(name: str, codes: str, ops: str, bad: object, text: str, operand: str, result: str, **more: object) -> None:
    fault(name, "backward", codes, ops, bad, text, operand, result, **more)


LEVEL = "level = (h.abs().mean(-1) + 0.2) * s[:, None]\n"
ADD = "\ny = h + 0.1 * worth[..., None]"

# --- forward: logarithms ---------------------------------------------------------------------------------------------
for _op in ("log", "log2", "log10"):
    _forward(_op, "log-of-nonpositive", _op, (0.0, -1.0), LEVEL + f"! worth = torch.{_op}(level)" + ADD, "level", "worth")
_forward("log1p", "log-of-nonpositive domain-error", "log1p", (0.0, -1.0), LEVEL + "level = level - 1\n! worth = level.log1p()" + ADD,
         "level", "worth")
_forward("p log p", "log-of-nonpositive", "log", 0.0, LEVEL + "! surprise = level.log()\nworth = -level * surprise" + ADD,
         "level", "surprise")
_forward("log in place", "log-of-nonpositive", "log", (0.0, -1.0), LEVEL + "worth = level.clone()\n! worth.log_()" + ADD,
         "level", "worth")
_forward("log of what is left", "log-of-nonpositive", "log", 100.0,
         "sure = torch.sigmoid(h.tanh() + s[:, None, None])\nrest = 1 - sure\n! worth = torch.log(rest)\ny = h - 0.1 * worth", "rest", "worth")
_forward("log of a spectrum", "log-of-nonpositive", "log", 0.0, """
spectrum = torch.fft.rfft(h.to(s.dtype) * s[:, None, None], dim=-1).abs()
! loudness = torch.log(spectrum)
y = h + 0.1 * loudness.mean(-1, keepdim=True)""", "spectrum", "loudness")
_forward("log, time first", "log-of-nonpositive", "log", (0.0, -1.0), """
moved = (h.abs() + 0.2).transpose(0, 1) * s[None, :, None]
! worth = torch.log(moved)
y = h + 0.1 * worth.transpose(0, 1)""", "moved", "worth", rows="1")
_forward("log, folded", "log-of-nonpositive", "log", (0.0, -1.0), """
flat = ((h.abs() + 0.2) * s[:, None, None]).reshape(-1, h.size(-1))
! worth = torch.log(flat)
y = h + 0.1 * worth.view(h.shape)""", "flat", "worth", rows="folded")
_forward("logit", "domain-error log-of-nonpositive", "logit", (0.0, -1.0), """
share = torch.sigmoid(h.tanh()) * s[:, None, None].clamp(max=1.0)
! odds = torch.logit(share)
y = h + 0.1 * odds""", "share", "odds")

# --- forward: divisions ----------------------------------------------------------------------------------------------
_forward("divide", "div-by-zero", "div", 0.0, LEVEL + "! worth = h.mean(-1) / level" + ADD, "level", "worth")
_forward("divide in place", "div-by-zero", "div", 0.0, "level = s[:, None, None]\ny = h.clone()\n! y.div_(level)", "level", "y")
_forward("zero by zero", "div-by-zero", "div", 0.0, """
part = h * s[:, None, None]
whole = part.abs().sum((1, 2), keepdim=True)
! share = part / whole
y = h + share""", "whole", "share")
_forward("mean of the kept", "div-by-zero", "div", 0.0, """
kept = pad & (s > 0.0)[:, None]
count = kept.sum(1)
! middle = (h * kept[..., None]).sum(1) / count[:, None]
y = h + 0.1 * middle[:, None]""", "count", "middle")
_forward("reciprocal", "div-by-zero", "reciprocal", 0.0, LEVEL + "! worth = level.reciprocal()" + ADD, "level", "worth")
_forward("one over", "div-by-zero", "reciprocal div", 0.0, LEVEL + "! worth = 1.0 / level" + ADD, "level", "worth")
_forward("rsqrt of zero", "div-by-zero domain-error sqrt-of-negative", "rsqrt", 0.0, LEVEL + "! worth = torch.rsqrt(level)" + ADD, "level",
         "worth")
_forward("negative power", "div-by-zero pow-domain", "pow reciprocal", 0.0, LEVEL + "! worth = level ** -1.5" + ADD, "level", "worth")
_forward("unit length", "div-by-zero", "div", 0.0, """
arrow = h * s[:, None, None]
length = torch.linalg.vector_norm(arrow, dim=-1, keepdim=True)
! unit = arrow / length
y = h + unit""", "length", "unit")
_forward("addcdiv", "div-by-zero", "addcdiv", 0.0,
         "level = (h.abs() + 0.2) * s[:, None, None]\nbase = h.to(level.dtype)\n! y = torch.addcdiv(base, base, level, value=0.1)", "level", "y")

# --- forward: roots, powers, domains ---------------------------------------------------------------------------------
_forward("sqrt", "sqrt-of-negative", "sqrt", -1.0, LEVEL + "! worth = torch.sqrt(level)" + ADD, "level", "worth")
_forward("variance by hand", "sqrt-of-negative", "sqrt", -3.0, """
spread = h.var(-1, correction=0) + s[:, None] * (1 + h.square().sum(-1).detach())
! deviation = spread.sqrt()
y = h / (1 + deviation[..., None])""", "spread", "deviation")
_forward("rsqrt", "sqrt-of-negative domain-error", "rsqrt", -1.0, LEVEL + "! worth = level.rsqrt()" + ADD, "level", "worth")
_forward("power", "pow-domain", "pow", -1.0, LEVEL + "! worth = torch.pow(level, 1.7)" + ADD, "level", "worth")
_forward("half power", "sqrt-of-negative pow-domain", "pow sqrt", -1.0, LEVEL + "! worth = level ** 0.5" + ADD, "level", "worth")
_forward("learnt power", "pow-domain", "pow", -1.0, LEVEL + "gamma = h.mean() * 0 + 0.7\n! worth = level.pow(gamma)" + ADD, "level", "worth")
for _op, _bad in (("acos", 1.6), ("asin", 1.6), ("atanh", 1.6)):
    _forward(_op, "domain-error", _op, _bad, f"""
cosine = torch.tanh(h.square() + 1) * (0.5 + (s > 1.55))[:, None, None] * 1.1
! angle = torch.{_op}(cosine)
y = h + angle""", "cosine", "angle")
_forward("atanh of one", "domain-error", "atanh", 50.0, """
squashed = torch.tanh(h.tanh() + s[:, None, None])
! angle = torch.atanh(squashed)
y = h + angle""", "squashed", "angle")
_forward("acosh", "domain-error", "acosh", 0.0, LEVEL + "level = level + s[:, None].sign()\n! worth = torch.acosh(level)" + ADD, "level", "worth")
_forward("erfinv", "domain-error", "erfinv", 50.0, """
squashed = torch.tanh(h.tanh() + s[:, None, None])
! angle = torch.erfinv(squashed)
y = h + angle""", "squashed", "angle")

# --- forward: too large ----------------------------------------------------------------------------------------------
SHIFTED = "high = h.tanh() + s[:, None, None]\n"
BIG = "high = (h.tanh() + 2.0) * s[:, None, None]\n"
for _op in ("exp", "expm1", "sinh", "cosh", "exp2"):
    _forward(_op, "overflow", _op, 5e3, SHIFTED + f"! huge = torch.{_op}(high)\ny = h + 0.1 * huge", "high", "huge")
_forward("softmax by hand", "overflow", "exp", 5e3, SHIFTED + "! raised = high.exp()\ny = h + raised / raised.sum(-1, keepdim=True)",
         "high", "raised")
_forward("log of a sum of exps", "overflow", "exp", 5e3, SHIFTED + "! raised = torch.exp(high)\ny = h + raised.sum(-1, keepdim=True).log()",
         "high", "raised")
_forward("overflow less overflow", "overflow", "exp", 5e3, SHIFTED + "! raised = torch.exp(high)\ny = h + (raised - raised.flip(-1)) * 0.1",
         "high", "raised")
_forward("square", "overflow", "pow square", 1e30, BIG + "! huge = high.square()\ny = h + 0.1 * huge", "high", "huge", bad64=(1e200,))
_forward("times itself", "overflow", "mul", 1e30, BIG + "! huge = high * high\ny = h + 0.1 * huge", "high", "huge", bad64=(1e200,))
_forward("cube", "overflow", "pow", 1e30, BIG + "! huge = high ** 3\ny = h + 0.01 * huge", "high", "huge", bad64=(1e200,))
_forward("in place overflow", "overflow", "mul", 1e30, BIG + "huge = high.clone()\n! huge.mul_(high)\ny = h + 0.1 * huge", "high", "huge",
         bad64=(1e200,))
_forward("matmul", "overflow", "bmm matmul", 1e30, BIG + "high = high.to(s.dtype)\n! seen = high @ high.transpose(1, 2)\ny = h + 0.01 * seen.mean(-1, keepdim=True)",
         "high", "seen", bad64=(1e200,))
_forward("einsum", "overflow", "bmm einsum matmul mul sum", 1e30,
         BIG + "! seen = torch.einsum('btd,bsd->bts', high, high)\ny = h + 0.01 * seen.mean(-1, keepdim=True)", "high", "seen", bad64=(1e200,))
_forward("sum", "overflow", "sum", 3e38, "high = (h.abs() + 1).sign() * s[:, None, None]\n! total = high.sum((1, 2))\ny = h + 0.01 * total[:, None, None]",
         "high", "total", bad64=(1.5e308,))
_forward("prod", "overflow", "prod", 1e15, BIG + "! total = high.prod(-1)\ny = h + 0.01 * total[..., None]",
         "high", "total", bad64=(1e120,))
_forward("cumprod", "overflow", "cumprod", 1e15, BIG + "! total = torch.cumprod(high, -1)\ny = h + 0.01 * total / (1 + total.abs())",
         "high", "total", bad64=(1e120,))
_forward("cast to half", "overflow", "to_copy to half copy", 1e6, BIG + "! short = high.half()\ny = h + 0.1 * short.to(h.dtype)", "high", "short")
_forward("stored in half", "overflow", "copy copy_ setitem", 1e6,
         BIG + "store = torch.zeros(h.shape, dtype=torch.float16)\n! store[:] = high\ny = h + 0.1 * store.to(h.dtype)", "high", "store")

# --- forward: infinities that were meant, and what went wrong with them -------------------------------------------------
MASKED = "kept = pad & (s > 0)[:, None]\nscores = h.mean(-1).masked_fill(~kept, -math.inf)\n"
_forward("masked softmax", "fully-masked-softmax", "softmax", (0.0, -1.0),
         MASKED + "! weights = torch.softmax(scores, -1)\ny = h + weights[..., None]", "", "weights")
_forward("masked log_softmax", "fully-masked-softmax", "log_softmax", 0.0,
         MASKED + "! weights = F.log_softmax(scores, -1)\ny = h + weights.exp()[..., None]", "", "weights")
_forward("masked attention", "fully-masked-softmax", "softmax", 0.0, """
kept = pad & (s > 0)[:, None]
scores = (h @ h.transpose(1, 2)) / h.size(-1) ** 0.5
scores = scores + torch.zeros_like(scores).masked_fill(~kept[:, None, :], -math.inf)
! weights = scores.softmax(-1)
y = h + weights.to(h.dtype) @ h""", "", "weights")
_forward("masked softmax module", "fully-masked-softmax", "softmax", 0.0,
         MASKED + "! weights = self.soft(scores)\ny = h + weights[..., None]", "", "weights", init="self.soft = nn.Softmax(-1)", child="soft")
_forward("masked multihead", "fully-masked-softmax", "softmax", 0.0, """
empty = ~(pad & (s > 0)[:, None])
! mixed, _ = self.attend(h, h, h, key_padding_mask=empty)
y = h + mixed""", "", "mixed", init="self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)", child="attend")
_forward("hand-made stable softmax", "inf-minus-inf", "sub", 0.0,
         MASKED + "peak = scores.max(-1, keepdim=True).values\n! lowered = scores - peak\nraised = lowered.exp()\ny = h + raised[..., None]",
         "", "lowered")
_forward("entropy with a mask", "zero-times-inf", "mul", 0.0, """
legal = torch.ones(h.shape, dtype=torch.bool)
legal[..., 0] = (s > 0)[:, None]
logs = h.masked_fill(~legal, -math.inf).log_softmax(-1)
! terms = logs.exp() * logs
y = h - 0.1 * terms.sum(-1, keepdim=True)""", "", "terms")
_forward("mask times minus infinity", "zero-times-inf", "mul", 0.0, """
closed = (s > 0)[:, None, None].to(h.dtype)
scores = h.masked_fill(closed == 0, -math.inf)
! opened = scores * closed
y = h + 0.1 * opened""", "", "opened")

# --- forward: nothing to reduce ---------------------------------------------------------------------------------------
_forward("mean of none", "empty-reduction", "mean", 0.0, "chosen = h[s > 0.0]\n! middle = chosen.mean()\ny = h - 0.1 * middle",
         "chosen", "middle", rows="all")
_forward("std of one", "empty-reduction", "std", 0.0, "chosen = h.mean((1, 2))[s < 0.25]\nif not len(chosen): chosen = h.flatten()\n"
         "! spread = chosen.std()\ny = h / (1 + spread)", "chosen", "spread", rows="one")
_forward("var of one", "empty-reduction", "var", 0.0, "chosen = h.mean((1, 2))[s < 0.25]\nif not len(chosen): chosen = h.flatten()\n"
         "! spread = torch.var(chosen)\ny = h / (1 + spread)", "chosen", "spread", rows="one")
_forward("means by row", "empty-reduction", "mean", 0.0, """
middles = []
for row, size in zip(h, (s > 0).long() * 2):
    ! middles.append(row[:size].mean(0))
y = h + 0.1 * torch.stack(middles)[:, None]""", "", "middles", rows="loop")

# --- backward: roots and powers at zero -----------------------------------------------------------------------------
_backward("sqrt at zero", "sqrt-grad-at-zero", "sqrt", 0.0, LEVEL + "! worth = torch.sqrt(level)" + ADD, "level", "worth")
_backward("distance by hand", "sqrt-grad-at-zero", "sqrt", 0.0, """
gap = (h.tanh() + 1.5) * s[:, None, None]
total = gap.square().sum(-1)
! distance = total.sqrt()
y = h + 0.1 * distance[..., None]""", "total", "distance")
_backward("half power at zero", "sqrt-grad-at-zero pow-domain", "pow sqrt", 0.0, LEVEL + "! worth = level ** 0.5" + ADD, "level", "worth")
_backward("small power at zero", "pow-domain", "pow", 0.0, LEVEL + "! worth = torch.pow(level, 0.3)" + ADD, "level", "worth")
_backward("sqrt, time first", "sqrt-grad-at-zero", "sqrt", 0.0, """
moved = (h.abs() + 0.2).transpose(0, 1) * s[None, :, None]
! worth = torch.sqrt(moved)
y = h + 0.1 * worth.transpose(0, 1)""", "moved", "worth", rows="1")
_backward("sqrt, folded", "sqrt-grad-at-zero", "sqrt", 0.0, """
flat = ((h.abs() + 0.2) * s[:, None, None]).reshape(-1, h.size(-1))
! worth = torch.sqrt(flat)
y = h + 0.1 * worth.view(h.shape)""", "flat", "worth", rows="folded")
_backward("sqrt in place", "sqrt-grad-at-zero", "sqrt", 0.0, LEVEL + "worth = level.clone()\n! worth.sqrt_()" + ADD, "level", "worth")

# --- backward: domains, decompositions, own derivatives -----------------------------------------------------------------
for _op in ("acos", "asin"):
    _backward(f"{_op} at one", "domain-error", _op, 0.0, f"""
cosine = torch.tanh(h) * 0.5 * s[:, None, None] / 1.5 + (s == 0)[:, None, None]
! angle = torch.{_op}(cosine)
y = h + 0.1 * angle""", "cosine", "angle")
_backward("acosh at one", "domain-error", "acosh", 0.0, LEVEL + "level = level + 1\n! worth = torch.acosh(level)" + ADD, "level", "worth")
_backward("eigh", "degenerate-decomposition", "linalg_eigh", 0.0, """
wide = h.to(s.dtype)
cover = wide.transpose(1, 2) @ wide * s[:, None, None] + torch.diag(torch.arange(h.size(-1))) * s[:, None, None]
cover = cover + torch.eye(h.size(-1), dtype=s.dtype)
! values, vectors = torch.linalg.eigh(cover)
y = h + 0.1 * (vectors * torch.arange(h.size(-1))).sum(-1)[:, None] + 0.01 * values[:, None]""", "cover", "vectors")
_backward("svd", "degenerate-decomposition", "linalg_svd svd", 0.0, """
wide = h.to(s.dtype)
cover = (wide.transpose(1, 2) @ wide + torch.diag(torch.arange(h.size(-1)))) * s[:, None, None] + torch.eye(h.size(-1), dtype=s.dtype)
! left, values, right = torch.linalg.svd(cover)
y = h + 0.1 * (left @ right * torch.arange(h.size(-1))).sum(-1)[:, None] + 0.01 * values[:, None]""", "cover", "left")
_backward("own backward", "div-by-zero", "div", 0.0, "level = (h.abs() + 0.2) * s[:, None, None]\nworth = Halve.apply(level)\ny = h + worth",
          "level", "halved", top="""
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
""")
_backward("own root", "div-by-zero sqrt-grad-at-zero domain-error sqrt-of-negative", "rsqrt", 0.0,
          "level = (h.abs() + 0.2) * s[:, None, None]\nworth = OwnRoot.apply(level)\ny = h + 0.1 * worth", "level", "slope", top="""
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
""")
_backward("slope too large", "grad-overflow", "mul", 1e25, """
still = h * (s < 2)[:, None, None]
scale = s[:, None, None]
! once = still * scale
twice = once * scale
y = h + 0.1 * twice""", "still", "once", bad64=(1e200,))

# --- backward: a branch that the forward drops --------------------------------------------------------------------------
_backward("where, exp branch", "where-grad", "exp", 5e3, """
high = h.tanh() + s[:, None, None]
! below = torch.exp(high) - 1
y = h + torch.where(high > 20, high.clamp(max=1), below)""", "high", "below")
_backward("where, log branch", "where-grad", "log", 0.0, LEVEL + "! logs = torch.log(level)\nworth = torch.where(level > 0, logs, 0.0)" + ADD,
          "level", "logs")
_backward("where, div branch", "where-grad", "div", 0.0,
          LEVEL + "! ratio = h.mean(-1) / level\nworth = torch.where(level > 0, ratio, torch.zeros_like(ratio))" + ADD, "level", "ratio")
_backward("where, sqrt branch", "where-grad", "sqrt", -1.0, LEVEL + "! root = level.sqrt()\nworth = torch.where(level > 0, root, 0.0)" + ADD,
          "level", "root")
_backward("where, sqrt of zero", "sqrt-grad-at-zero where-grad", "sqrt", 0.0,
          LEVEL + "! root = level.sqrt()\nworth = torch.where(level > 0, root, 0.0)" + ADD, "level", "root")
_backward("masked_fill over log", "where-grad", "log", 0.0, LEVEL + "! logs = level.log()\nworth = logs.masked_fill(level <= 0, 0.0)" + ADD,
          "level", "logs")
_backward("kept elements of log", "where-grad", "log", 0.0,
          LEVEL + "! logs = level.log()\nworth = logs[level > 0].mean()\ny = h + 0.1 * worth", "level", "logs", wide=True)
_backward("nan_to_num over log", "where-grad log-of-nonpositive", "log", 0.0,
          LEVEL + "! logs = level.log()\nworth = torch.nan_to_num(logs, nan=0.0, neginf=0.0)" + ADD, "level", "logs")
_backward("clamp over log", "log-of-nonpositive", "log", 0.0, LEVEL + "! logs = level.log()\nworth = logs.clamp(min=-9.0)" + ADD, "level", "logs")
_backward("maximum over log", "log-of-nonpositive where-grad", "log", 0.0,
          LEVEL + "! logs = level.log()\nworth = torch.maximum(logs, torch.full_like(logs, -9.0))" + ADD, "level", "logs")
_backward("clamp over exp", "overflow where-grad", "exp", 5e3, SHIFTED + "! huge = high.exp()\ny = h + 0.1 * huge.clamp(max=8.0)", "high", "huge")
