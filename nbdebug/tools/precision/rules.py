"""All that is known of the modules that have to stay in float32, and of lost gradients, as numbers, names and places,
no tensors; and the rules, from there to the causes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from nbdebug.registry import rule, rules
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import figures, listed, percent

NOWHERE = Where()


@dataclasses.dataclass(frozen=True)
class HalfStep:
    """One step. loss: of the first batch that is furthest off; off: relative distance from the float32 loss, inf where
    something is not finite; bad: parameters whose gradient is not finite; seconds; memory: peak bytes above what was
    held, on an accelerator, else None; error: what the step raised, or ""."""

    loss: float
    off: float
    bad: tuple[str, ...] = ()
    seconds: float = 0.0
    memory: int | None = None
    error: str = ""

    @property
    def finite(self) -> bool:
        return not self.error and not self.bad and math.isfinite(self.loss)


@dataclasses.dataclass(frozen=True)
class HalfEvent:
    """What an op did in half precision. what: "overflow" (finite operands gave a value beyond the dtype), "guard" (a
    small constant that protects a division became zero), "underflow" (values became zero); op: ATen base name; size:
    its value in float32 (the largest, the constant, or the largest that was lost); share: of its elements; phase."""

    what: str
    op: str
    size: float
    share: float = 0.0
    phase: str = "forward"
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A module that has to be kept. off: how far off the loss is with this one in half and the others kept; events:
    what its ops did, first to last; rounded: whether it stays wrong in float32 when only its inputs and buffers are
    rounded to the dtype (None: not tried); error: of its output by itself; where: the line of its forward, or of its
    call where that is torch's; raised: what the step raises with this one in half, or ""."""

    module: str
    kind: str
    off: float
    events: tuple[HalfEvent, ...] = ()
    rounded: bool | None = None
    error: float = 0.0
    largest: float = 0.0
    bad: tuple[str, ...] = ()
    where: Where = NOWHERE
    raised: str = ""


@dataclasses.dataclass(frozen=True)
class ModulePrecision:
    """A module's values in the float32 step. largest, smallest: magnitudes of its output, zeros left out; tiny: share
    of them below the dtype's smallest normal number; error: of its output in half on the same inputs; gradient: the
    largest that reached its output; float32_error: of its output in float32 against float64, None where unknown."""

    name: str
    kind: str
    largest: float
    smallest: float
    tiny: float
    error: float
    broken: bool = False
    gradient: float = 0.0
    gradient_tiny: float = 0.0
    calls: int = 1
    leaf: bool = True
    float32_error: float | None = None


@dataclasses.dataclass(frozen=True)
class Tried:
    """One trial: what was kept, and how far off the loss was (inf: not finite, or an error)."""

    kept: tuple[str, ...]
    worked: bool
    off: float


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """lost: parameters whose gradient is zero in half and not in float32; off: how far the norm of all gradients is
    from float32's, relative, without a scale; scale: a loss scale that was tried; off_scaled: the same with it."""

    lost: tuple[str, ...]
    off: float
    scale: float
    off_scaled: float


@dataclasses.dataclass(frozen=True)
class Exact:
    """The step in float64. off, norm_off: how far float32's loss, and its norm of all gradients, are from float64's,
    relative (None: only its forward ran); seconds; errors: of each module's output in float32, on the same inputs."""

    off: float
    norm_off: float | None
    seconds: float = 0.0
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class UnscaleOrder:
    """What an optimizer gets depends on the loss scale. left, written, got: norms of all gradients after backward,
    when the scale was taken out, and when the optimizer stepped, with `scale`; got_smaller: the last with a scale 16
    times smaller; mended: the last with the scale taken out right after backward; never: it is never taken out; where:
    the line that changes gradients while they carry the scale."""

    scale: float
    left: float
    written: float
    got: float
    got_smaller: float
    mended: float
    never: bool
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class PrecisionFacts:
    """See the top of the file. largest, tiny: the dtype's largest and smallest normal number; minimal: the tries show
    that nothing can be taken out; stopped: why the search ended early, or ""."""

    dtype: str
    mode: str
    tolerance: float
    largest: float
    tiny: float
    float32: HalfStep
    half: HalfStep
    mixed: HalfStep | None = None
    kept: tuple[str, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    modules: tuple[ModulePrecision, ...] = ()
    tries: tuple[Tried, ...] = ()
    minimal: bool = True
    stopped: str = ""
    scaling: LossScaling | None = None
    epsilon: tuple[float, str, str] | None = None
    order: UnscaleOrder | None = None
    exact: Exact | None = None
    unchecked: tuple[str, ...] = ()


FINFO = "https://pytorch.org/docs/stable/type_info.html"
AMP = "https://pytorch.org/docs/stable/amp.html"

IN_FLOAT32 = Fix("Or compute it in float32 inside the module.", "h = x.float()   # and back at the end: .to(x.dtype)")


def name_all(facts: PrecisionFacts) -> list[Finding]:
    """The findings, most likely first: a cause for each kind of fault among the kept modules, then what is around."""
    return [finding for rule in rules("precision") if (finding := rule.check(facts)) is not None]


# Wording


def distance(off: float) -> str:
    """A relative distance of losses; "not finite" for inf."""
    return percent(off) if math.isfinite(off) else "not finite"


def module_name(module: str) -> str:
    return f"`{module}`" if module else "the model itself"


def module_list(modules: Iterable[str], most: int = 3) -> str:
    return listed(map(module_name, modules), most, quote="")


# The step


@rule(
    code="precision/loss-scale-needed",
    title="Gradients are too small for half precision and become zero.",
    symptom="The loss is finite and right, and some or all weights never change.",
    cause="Gradients below about 6e-8 are zero in float16. Without a loss scale, layers far from the loss, or a loss "
    "that is a mean over many values, have no larger ones.",
    confirm="Print the gradients' norms by parameter, in float16 and in float32: zero in the one, not in the other.",
    fix="Scale the loss: `torch.amp.GradScaler`, with `scaler.unscale_(optimizer)` before clipping; or train in "
    "bfloat16, which has float32's range and needs no scale.",
    reference="https://arxiv.org/abs/1710.03740",
)
def loss_scale_needed(facts: PrecisionFacts) -> Finding | None:
    scaling = facts.scaling
    if scaling is None or facts.kept:
        return None
    fix = Fix(
        "Scale the loss, and unscale before the update.",
        "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        scaling.off_scaled < scaling.off,
        {
            "scale": scaling.scale,
            "gradients' norm off by": percent(scaling.off_scaled),
            "without it": percent(scaling.off),
        },
    )
    return Finding(
        "precision/loss-scale-needed",
        f"The gradient of {module_list(scaling.lost)} is zero in {facts.dtype} and not in float32: the loss needs a "
        "scale",
        Where(phase="backward", module=scaling.lost[0].rpartition(".")[0]),
        {
            "where": scaling.lost,
            "parameters without a gradient": len(scaling.lost),
            "norm of all gradients off by": percent(scaling.off),
        },
        (fix,),
    )


@rule(
    code="precision/unscale-order",
    title="Gradients are changed while they still carry the loss scale.",
    symptom="With a GradScaler the model hardly learns, or learns in leaps; without it the same script does. The norm "
    "that `clip_grad_norm_` returns is in the thousands.",
    cause="`scaler.scale(loss).backward()` leaves gradients that are 65,536 times too large. Clipped to 1 and unscaled "
    "afterwards they are 65,536 times too small; never unscaled, they make an update that is far too large. For a "
    "whole training the same fault is called training/clip-before-unscale.",
    confirm="Compare the gradients before the update for `GradScaler(init_scale=2**12)` and `2**16`: they must be "
    "equal.",
    fix="scale, backward, `scaler.unscale_(optimizer)`, clip, `scaler.step(optimizer)`, `scaler.update()`: in this "
    "order.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
)
def unscale_order(facts: PrecisionFacts) -> Finding | None:
    order = facts.order
    if order is None:
        return None
    scale = figures(order.scale)
    fault = (
        f"The gradients are never unscaled: they carry the loss scale {scale}"
        if order.never
        else f"Gradients are changed while they still carry the loss scale {scale}: from a norm of "
        f"{figures(order.left)} to {figures(order.written)}"
    )
    clip = order.where.text or "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    code = (
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)",
        *[clip] * (not order.never),
        "scaler.step(optimizer)",
        "scaler.update()",
    )
    fix = Fix(
        "Let the scaler step the optimizer: it unscales the gradients." if order.never else "Unscale first, then clip.",
        "\n".join(code),
        _is_mended(order),
        {"norm that the optimizer gets": order.mended, "before": order.got},
    )
    return Finding(
        "precision/unscale-order",
        f"{fault}; the optimizer gets a norm of {figures(order.got)} and should get {figures(order.mended)}",
        order.where,
        {
            "where": ("clip_grad_norm_", "unscale_", "scaler"),
            "scale": order.scale,
            "norm after backward": order.left,
            "norm when the scale is taken out": order.written,
            "norm that the optimizer gets": order.got,
            "the same with a scale 16 times smaller": order.got_smaller,
        },
        (fix,),
    )


def _is_mended(order: UnscaleOrder) -> bool:
    """With the scale taken out after backward, is the norm no larger than the whole gradient's, and not vanishing?"""
    whole = order.left / order.scale
    return 0 < order.mended <= 1.01 * whole and order.mended != order.got


@rule(
    code="precision/epsilon-underflow",
    title="The optimizer's epsilon is zero in the dtype of the weights.",
    symptom="float16 weights become NaN or inf in the first updates, where a gradient is zero.",
    cause="Adam divides by the root of a running mean of squares plus epsilon. In float16 1e-8 is zero, and so is the "
    "mean for weights without a gradient: 0 / 0.",
    confirm="`torch.tensor(optimizer.param_groups[0]['eps'], dtype=torch.float16)` is 0.",
    fix="Keep the weights in float32 and use autocast; or choose an epsilon that the dtype can hold (1e-4 in float16).",
    reference=AMP,
)
def epsilon_underflow(facts: PrecisionFacts) -> Finding | None:
    if facts.epsilon is None:
        return None
    eps, optimizer, dtype = facts.epsilon
    fixes = (
        Fix(
            "Keep the weights in float32, and run the step under autocast.",
            f'with torch.autocast("cuda", dtype=torch.{dtype}):\n    loss = loss_fn(model, batch)',
        ),
        Fix(
            "Or choose an epsilon that the dtype can hold.",
            f"torch.optim.{optimizer}(model.parameters(), eps=1e-4)",
        ),
    )
    return Finding(
        "precision/epsilon-underflow",
        f"{optimizer}'s epsilon of {figures(eps)} is zero in {dtype}, the dtype of the weights that it updates",
        Where(phase="optimizer"),
        {"where": ("optimizer", "eps"), "eps": eps, f"eps in {dtype}": 0.0},
        fixes,
    )


# The modules that have to stay in float32


@rule(
    code="precision/half-overflow",
    title="Values leave the range of the half precision type.",
    symptom="Fine in float32; NaN or inf in float16, or zeros where a norm divides by an infinite sum of squares.",
    cause="The largest float16 is 65,504. Squares, sums over many values, exponentials and activations with one very "
    "large channel go beyond it; the next op divides by inf or subtracts inf from inf.",
    confirm="Compare the largest magnitude of the module's inner values in float32 with 65,504.",
    fix="Keep the module in float32 (`nbdebug.keep_fp32`), compute the square or the sum on `x.float()`, scale before "
    "instead of after, or train in bfloat16, whose range is that of float32.",
    reference=FINFO,
)
def half_overflow(facts: PrecisionFacts) -> Finding | None:
    guilty = _with_cause(facts, "half-overflow")
    if not guilty:
        return None
    event = _first_event(guilty[0], "overflow")
    assert event is not None
    place = "in" if event.where.module == guilty[0].module else "behind"
    title = (
        f"`{event.op}` {place} {module_name(guilty[0].module)} gives {figures(event.size)}, and the largest "
        f"{facts.dtype} is {figures(facts.largest)}"
    )
    other = (Fix("Or use bfloat16, which has float32's range.", "dtype=torch.bfloat16"),) * (facts.dtype == "float16")
    return _finding("half-overflow", title, facts, guilty, event, (IN_FLOAT32, *other))


@rule(
    code="precision/half-underflow",
    title="A small value or constant becomes zero in half precision.",
    symptom="NaN or inf in float16 only, often where a row is empty or constant; or probabilities that vanish.",
    cause="Below about 6e-8 float16 has nothing but zero (bfloat16 below 1e-40). An epsilon of 1e-8 or 1e-12 then no "
    "longer protects a division, a logarithm or a root, and products of small numbers disappear.",
    confirm="`torch.tensor(1e-12, dtype=torch.float16)` is 0.",
    fix="Keep the module in float32, or use an epsilon that the type can hold (1e-5 and larger in float16).",
    reference=FINFO,
)
def half_underflow(facts: PrecisionFacts) -> Finding | None:
    guilty = _with_cause(facts, "half-underflow")
    if not guilty:
        return None
    event = _first_event(guilty[0], "guard") or _first_event(guilty[0], "underflow")
    assert event is not None
    guard = event.what == "guard"
    what = (
        f"the constant {figures(event.size)} in `{event.op}`"
        if guard
        else f"the result of `{event.op}` (up to {figures(event.size)})"
    )
    fix = Fix("Or use an epsilon that the type can hold.", "eps=1e-5") if guard else IN_FLOAT32
    title = f"In {module_name(guilty[0].module)} {what} is zero in {facts.dtype}"
    return _finding("half-underflow", title, facts, guilty, event, (fix,))


@rule(
    code="precision/dtype-cast-lost",
    title="Inputs or buffers lose needed digits when they are cast.",
    symptom="Nothing is NaN, and the results are wrong: late positions, large ids, timestamps, long frequencies.",
    cause="bfloat16 has 8 significant bits and float16 11: from 256 (or 2,048) on, not every whole number exists. "
    "Positions and counters that are cast, or a buffer of frequencies or statistics, are rounded.",
    confirm="Print `x.to(torch.bfloat16).float() - x` for the module's inputs and buffers.",
    fix="Keep the module in float32, and cast its result instead of its inputs.",
    reference=AMP,
)
def dtype_cast_lost(facts: PrecisionFacts) -> Finding | None:
    guilty = _with_cause(facts, "dtype-cast-lost")
    if not guilty:
        return None
    title = (
        f"{facts.dtype} can't hold the inputs or buffers of {module_name(guilty[0].module)}: its result is off by "
        f"{percent(guilty[0].error)}"
    )
    return _finding("dtype-cast-lost", title, facts, guilty, None, ())


@rule(
    code="precision/unsafe-op-in-half",
    title="The module's arithmetic is too coarse in half precision.",
    symptom="Nothing is NaN, and the loss is off: long sums stop growing, differences of near numbers vanish.",
    cause="In bfloat16 a sum stops growing once it is 256 times its terms, in float16 2,048 times; of near numbers, "
    "the difference keeps one or two digits. Library kernels add up in float32, handwritten loops do not.",
    confirm="Run the module in float32 on the same, rounded inputs: it is right again.",
    fix="Keep the module in float32, or accumulate in float32 (`x.float().sum(1).to(x.dtype)`).",
    reference=AMP,
)
def unsafe_op_in_half(facts: PrecisionFacts) -> Finding | None:
    guilty = _with_cause(facts, "unsafe-op-in-half")
    if not guilty:
        return None
    first, name = guilty[0], module_name(guilty[0].module)
    if first.raised:
        title = f"{name} does not run in {facts.dtype}: {first.raised[:120]}"
    elif first.error > 0.01:
        title = f"{name} is too coarse in {facts.dtype}: by itself its result is off by {percent(first.error)}"
    else:
        loss = f"off by {percent(first.off)}" if math.isfinite(first.off) else "not finite"
        title = f"{name} is too coarse in {facts.dtype}: with it in half precision the loss is {loss}"
    fix = Fix("Or accumulate in float32 inside the module.", "total = x.float().sum(1).to(x.dtype)")
    return _finding("unsafe-op-in-half", title, facts, guilty, None, (fix,))


def cause_of(culprit: Culprit) -> str:
    """The slug of what is wrong with a kept module."""
    kinds = {event.what for event in culprit.events}
    if "overflow" in kinds:
        return "half-overflow"
    if culprit.rounded:
        return "dtype-cast-lost"
    return "half-underflow" if kinds & {"guard", "underflow"} else "unsafe-op-in-half"


def _with_cause(facts: PrecisionFacts, slug: str) -> list[Culprit]:
    return [culprit for culprit in facts.culprits if cause_of(culprit) == slug]


def _first_event(culprit: Culprit, kind: str) -> HalfEvent | None:
    return next((event for event in culprit.events if event.what == kind), None)


def _finding(
    slug: str, title: str, facts: PrecisionFacts, guilty: list[Culprit], event: HalfEvent | None, fixes: tuple[Fix, ...]
) -> Finding:
    """A finding over modules of one cause."""
    first, *others = guilty
    op = event.where if event is not None else Where(phase="forward")
    line = op if op.line is not None else first.where
    where = Where(
        phase=op.phase,
        module=first.module,
        module_type=first.kind,
        op=op.op,
        file=line.file,
        line=line.line,
        text=line.text,
        cell=line.cell,
    )
    evidence = {
        "where": tuple(c.module for c in guilty),
        "loss in float32": facts.float32.loss,
        f"loss in {facts.dtype}": facts.half.loss,
    }
    if others:
        title += f"; likewise {module_list(c.module for c in others)}"
        evidence["modules"] = [
            {"module": c.module, "loss off by": distance(c.off), "own error": percent(c.error), "largest": c.largest}
            for c in guilty
        ]
    chain = _chain(guilty, facts)
    return Finding(f"precision/{slug}", title, where, evidence, (_keep_fix(facts), *fixes), chain)


def _keep_fix(facts: PrecisionFacts) -> Fix:
    """Keep the modules of the set in float32, tried on the whole step."""
    names = ", ".join(repr(name) for name in facts.kept)
    modules = "the whole model" if facts.kept == ("",) else module_list(facts.kept, 8)
    title, code = f"Keep {modules} in float32.", f"nbdebug.keep_fp32(model, [{names}])"
    mixed = facts.mixed
    if mixed is None:
        return Fix(title, code)
    gradients = "finite" if mixed.finite else "not finite"
    return Fix(
        title,
        code,
        mixed.finite and mixed.off <= facts.tolerance,
        {"loss": mixed.loss, "in float32": facts.float32.loss, "gradients": gradients},
    )


def _chain(guilty: list[Culprit], facts: PrecisionFacts) -> tuple[Link, ...]:
    links = [
        Link(_describe(event, facts), event.where, {"share": percent(event.share)} if 0 < event.share < 1 else {})
        for culprit in guilty[:3]
        for event in culprit.events[:3]
    ]
    end = f"the loss is {figures(facts.half.loss)} in {facts.dtype}, {figures(facts.float32.loss)} in float32"
    bad = facts.half.bad
    return (*links, Link(end + (f"; gradients that are not finite: {module_list(bad)}" if bad else "")))


def _describe(event: HalfEvent, facts: PrecisionFacts) -> str:
    if event.what == "overflow":
        backward = " (in the backward)" if event.phase == "backward" else ""
        return (
            f"`{event.op}` makes {figures(event.size)} from finite numbers; the largest {facts.dtype} is "
            f"{figures(facts.largest)}{backward}"
        )
    if event.what == "guard":
        return f"the constant {figures(event.size)} in `{event.op}` is zero in {facts.dtype} and protects nothing"
    return f"`{event.op}` gives zeros where float32 gives up to {figures(event.size)}"
