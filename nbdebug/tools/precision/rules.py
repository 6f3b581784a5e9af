"""The rules: from the modules that have to stay in float32, and from lost gradients, to the causes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nbdebug.registry import rule, rules
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.precision.facts import Culprit, HalfEvent, PrecisionFacts, UnscaleOrder


def short(value: float) -> str:
    """Three or four figures: 65504 → "65,504", 9000000 → "9.00e6", 1e-12 → "1e-12"."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    head, mark, power = f"{value:.3g}".partition("e")
    return head + (f"e{int(power)}" if mark else "")


def distance(off: float) -> str:
    """A relative distance of losses; "not finite" for inf."""
    return "not finite" if not math.isfinite(off) else f"{off:.1%}"


def named(module: str) -> str:
    """A module as a sentence names it."""
    return f"`{module}`" if module else "the model itself"


def listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(map(named, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def kept_fix(facts: PrecisionFacts) -> Fix:
    """Keep the modules that were found, tried on the whole step."""
    named = ", ".join(repr(name) for name in facts.kept)
    title = f"Keep {listed(facts.kept, 8)} in float32." if facts.kept != ("",) else "Keep the whole model in float32."
    code = f"nbdebug.keep_fp32(model, [{named}])"
    mixed = facts.mixed
    if mixed is None:
        return Fix(title, code)
    works = mixed.finite and mixed.off <= facts.tolerance
    return Fix(
        title,
        code,
        works,
        {"loss": mixed.loss, "in float32": facts.float32.loss, "gradients": "finite" if mixed.finite else "not finite"},
    )


@rule(
    code="precision/loss-scale-needed",
    title="Gradients are too small for half precision and become zero.",
    symptom="The loss is finite and right, and some or all weights stay as they are.",
    cause="Gradients below about 6e-8 are zero in float16. Without a loss scale, layers far from the loss, or a loss "
    "that is a mean over many values, give nothing else.",
    confirm="The gradients' norms by parameter, in float16 beside float32: zero in the one, not in the other.",
    fix="Scale the loss: `torch.amp.GradScaler`, with `scaler.unscale_(optimizer)` before clipping; or train in "
    "bfloat16, which has float32's range and needs no scale.",
    reference="https://arxiv.org/abs/1710.03740",
)
def loss_scale_needed(facts: PrecisionFacts) -> Finding | None:
    scaling = facts.scaling
    if scaling is None or facts.kept:
        return None
    title = (
        f"The gradient of {listed(scaling.lost)} is zero in {facts.dtype} and not in float32: the loss needs a scale"
    )
    fix = Fix(
        "Scale the loss, and unscale before the update.",
        "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        scaling.off_scaled < scaling.off,
        {
            "scale": scaling.scale,
            "gradients' norm off by": f"{scaling.off_scaled:.1%}",
            "without it": f"{scaling.off:.1%}",
        },
    )
    evidence = {
        "where": scaling.lost,
        "parameters without a gradient": len(scaling.lost),
        "norm of all gradients off by": f"{scaling.off:.1%}",
    }
    module = scaling.lost[0].rpartition(".")[0]
    return Finding("precision/loss-scale-needed", title, Where(phase="backward", module=module), evidence, (fix,))


@rule(
    code="precision/unscale-order",
    title="Gradients are changed while they still carry the loss scale.",
    symptom="With a GradScaler the model hardly learns, or in leaps; without it the same script does. The norm that "
    "`clip_grad_norm_` returns is in the thousands.",
    cause="`scaler.scale(loss).backward()` leaves gradients that are 65,536 times too large. Clipped to 1 and unscaled "
    "afterwards they are 65,536 times too small; never unscaled, they make an update that is far too large. Seen "
    "in a whole training the same fault is called training/clip-before-unscale.",
    confirm="What the optimizer gets must be the same with `GradScaler(init_scale=2**12)` as with `2**16`.",
    fix="scale, backward, `scaler.unscale_(optimizer)`, clip, `scaler.step(optimizer)`, `scaler.update()`: in this "
    "order.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
)
def unscale_order(facts: PrecisionFacts) -> Finding | None:
    order = facts.order
    if order is None:
        return None
    said = (
        f"The loss scale {order.scale:g} is never taken out of the gradients"
        if order.never
        else f"Gradients are changed while they still carry the loss scale {order.scale:g}: from a norm of "
        f"{short(order.left)} to {short(order.written)}"
    )
    title = f"{said}; the optimizer gets a norm of {short(order.got)} where it should get {short(order.mended)}"
    clip = order.where.text or "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    code = "\n".join(
        (
            "scaler.scale(loss).backward()",
            "scaler.unscale_(optimizer)",
            *[clip] * (not order.never),
            "scaler.step(optimizer)",
            "scaler.update()",
        )
    )
    fix = Fix(
        "Let the scaler step the optimizer: it takes the scale out."
        if order.never
        else "Take the scale out first, then clip.",
        code,
        _nearer(order),
        {"norm that the optimizer gets": order.mended, "before": order.got},
    )
    evidence = {
        "where": ("clip_grad_norm_", "unscale_", "scaler"),
        "scale": order.scale,
        "norm behind backward": order.left,
        "norm when the scale is taken out": order.written,
        "norm that the optimizer gets": order.got,
        "the same with a scale 16 times smaller": order.got_smaller,
    }
    return Finding("precision/unscale-order", title, order.where, evidence, (fix,))


def _nearer(order: UnscaleOrder) -> bool:
    """With the scale taken out behind backward, is the norm no larger than the whole gradient's, and not vanishing?"""
    whole = order.left / order.scale
    return 0 < order.mended <= 1.01 * whole and order.mended != order.got


@rule(
    code="precision/epsilon-underflow",
    title="The optimizer's epsilon is zero in the dtype of the weights.",
    symptom="float16 weights become NaN or inf in the first updates, where a gradient is zero.",
    cause="Adam divides by the root of a running mean of squares plus epsilon. In float16 1e-8 is zero, and so is the "
    "mean for weights without a gradient: 0 / 0.",
    confirm="`torch.tensor(optimizer.param_groups[0]['eps'], dtype=torch.float16)` is 0.",
    fix="Keep the weights in float32 and use autocast; or an epsilon that the dtype holds (1e-4 in float16).",
    reference="https://pytorch.org/docs/stable/amp.html",
)
def epsilon_underflow(facts: PrecisionFacts) -> Finding | None:
    if facts.epsilon is None:
        return None
    eps, optimizer, dtype = facts.epsilon
    title = f"{optimizer}'s epsilon of {short(eps)} is zero in {dtype}, the dtype of the weights that it updates"
    fixes = (
        Fix(
            "Keep the weights in float32, and run the step under autocast.",
            f'with torch.autocast("cuda", dtype=torch.{dtype}):\n    loss = loss_fn(model, batch)',
        ),
        Fix("Or give it an epsilon that the dtype holds.", f"torch.optim.{optimizer}(model.parameters(), eps=1e-4)"),
    )
    return Finding(
        "precision/epsilon-underflow",
        title,
        Where(phase="optimizer"),
        {"where": ("optimizer", "eps"), "eps": eps, f"eps in {dtype}": 0.0},
        fixes,
    )


ENDS = "https://pytorch.org/docs/stable/type_info.html"
AUTOCAST = "https://pytorch.org/docs/stable/amp.html"


def cause(culprit: Culprit) -> str:
    """The slug of what is wrong with a kept module."""
    kinds = {event.what for event in culprit.events}
    if "overflow" in kinds:
        return "half-overflow"
    if culprit.rounded:
        return "dtype-cast-lost"
    return "half-underflow" if kinds & {"guard", "underflow"} else "unsafe-op-in-half"


def first(culprit: Culprit, *kinds: str) -> HalfEvent | None:
    return next((event for event in culprit.events if event.what in kinds), None)


def finding(
    code: str, title: str, facts: PrecisionFacts, guilty: list[Culprit], event: HalfEvent | None, fixes: tuple[Fix, ...]
) -> Finding:
    """A finding over modules of one cause."""
    op = event.where if event is not None else Where(phase="forward")
    line = op if op.line is not None else guilty[0].where
    where = Where(
        phase=op.phase,
        module=guilty[0].module,
        module_type=guilty[0].kind,
        op=op.op,
        file=line.file,
        line=line.line,
        text=line.text,
        cell=line.cell,
    )
    rows = [
        {
            "module": c.module,
            "loss is off by, with it in half": distance(c.off),
            "its own error": c.error,
            "largest output": c.largest,
        }
        for c in guilty
    ]
    evidence = {
        "where": tuple(c.module for c in guilty),
        "dtype": facts.dtype,
        "mode": facts.mode,
        "loss in float32": facts.float32.loss,
        f"loss in {facts.dtype}": facts.half.loss,
        "modules": rows,
    }
    if facts.exact is not None:
        evidence["float32 is off from float64 by"] = facts.exact.off
    return Finding(code, title, where, evidence, (kept_fix(facts), *fixes), _chain(guilty, facts))


def _chain(guilty: list[Culprit], facts: PrecisionFacts) -> tuple[Link, ...]:
    links = [
        Link(_told(event, facts), event.where, {"share": event.share} if 0 < event.share < 1 else {})
        for culprit in guilty[:3]
        for event in culprit.events[:3]
    ]
    end = f"the loss is {short(facts.half.loss)} in {facts.dtype}, {short(facts.float32.loss)} in float32"
    bad = facts.half.bad
    return (*links, Link(end + (f"; gradients that are not finite: {listed(bad)}" if bad else "")))


def _told(event: HalfEvent, facts: PrecisionFacts) -> str:
    if event.what == "overflow":
        return (
            f"`{event.op}` makes {short(event.size)} of finite numbers; {facts.dtype} ends at "
            f"{short(facts.largest)}" + (" (in the backward)" if event.phase == "backward" else "")
        )
    if event.what == "guard":
        return f"the constant {short(event.size)} in `{event.op}` is zero in {facts.dtype}: it guards nothing"
    return f"`{event.op}` gives zeros where float32 gives up to {short(event.size)}"


def of(facts: PrecisionFacts, slug: str) -> list[Culprit]:
    return [culprit for culprit in facts.culprits if cause(culprit) == slug]


@rule(
    code="precision/half-overflow",
    title="Values leave the range of the half precision type.",
    symptom="Fine in float32; NaN or inf in float16, or noughts where a norm divides by an infinite sum of squares.",
    cause="float16 ends at 65,504. Squares, sums over many values, exponentials and activations with one very large "
    "channel go beyond it; what follows divides by inf or subtracts inf from inf.",
    confirm="The largest magnitude of the module's inner values in float32, against 65,504.",
    fix="Keep the module in float32 (`nbdebug.keep_fp32`), compute the square or the sum on `x.float()`, scale before "
    "instead of after, or train in bfloat16, whose range is that of float32.",
    reference=ENDS,
)
def half_overflow(facts: PrecisionFacts) -> Finding | None:
    guilty = of(facts, "half-overflow")
    if not guilty:
        return None
    event = first(guilty[0], "overflow")
    assert event is not None
    title = (
        f"`{event.op}` in {named(guilty[0].module)} makes {short(event.size)}, and {facts.dtype} ends at "
        f"{short(facts.largest)}"
    )
    inside = Fix(
        "Or compute it in float32 inside of the module.", "h = x.float()   # and back at the end: .to(x.dtype)"
    )
    other = (Fix("Or use bfloat16, which has float32's range.", "dtype=torch.bfloat16"),) * (facts.dtype == "float16")
    return finding("precision/half-overflow", title + _others(guilty), facts, guilty, event, (inside, *other))


@rule(
    code="precision/half-underflow",
    title="A small value or constant becomes zero in half precision.",
    symptom="NaN or inf in float16 only, often where a row is empty or constant; or probabilities that vanish.",
    cause="Below about 6e-8 float16 has nothing but zero (bfloat16 below 1e-40). An epsilon of 1e-8 or 1e-12 that "
    "guards a division, a logarithm or a root is then no guard, and products of small numbers disappear.",
    confirm="`torch.tensor(1e-12, dtype=torch.float16)` is 0.",
    fix="Keep the module in float32, or use a guard that the type can hold (1e-5 and larger in float16).",
    reference=ENDS,
)
def half_underflow(facts: PrecisionFacts) -> Finding | None:
    guilty = of(facts, "half-underflow")
    if not guilty:
        return None
    event = first(guilty[0], "guard") or first(guilty[0], "underflow")
    assert event is not None
    what = (
        f"the constant {short(event.size)} in `{event.op}`"
        if event.what == "guard"
        else f"what `{event.op}` gives (up to {short(event.size)})"
    )
    title = f"In {named(guilty[0].module)} {what} is zero in {facts.dtype}"
    guard = (
        Fix("Or use a guard that the type can hold.", "eps=1e-5")
        if event.what == "guard"
        else Fix(
            "Or compute it in float32 inside of the module.", "h = x.float()   # and back at the end: .to(x.dtype)"
        )
    )
    return finding("precision/half-underflow", title + _others(guilty), facts, guilty, event, (guard,))


@rule(
    code="precision/dtype-cast-lost",
    title="Inputs or buffers lose what matters when they are cast.",
    symptom="Nothing is NaN, and the results are wrong: late positions, large ids, timestamps, long frequencies.",
    cause="bfloat16 has 8 significant bits and float16 11: from 256 (or 2,048) on, not every whole number exists. "
    "Positions and counters that are cast, or a buffer of frequencies or statistics, come out rounded.",
    confirm="`x.to(torch.bfloat16).float() - x` for what the module is given, and for its buffers.",
    fix="Keep the module in float32, and cast its result instead of its inputs.",
    reference=AUTOCAST,
)
def dtype_cast_lost(facts: PrecisionFacts) -> Finding | None:
    guilty = of(facts, "dtype-cast-lost")
    if not guilty:
        return None
    title = (
        f"{named(guilty[0].module)} is given inputs or buffers that {facts.dtype} can't hold: its result is off "
        f"by {guilty[0].error:.0%}"
    )
    return finding("precision/dtype-cast-lost", title + _others(guilty), facts, guilty, None, ())


@rule(
    code="precision/unsafe-op-in-half",
    title="The module's arithmetic is too coarse in half precision.",
    symptom="Nothing is NaN, and the loss is off: long sums stop growing, differences of near numbers vanish.",
    cause="In bfloat16 a sum stops growing once it is 256 times its terms, in float16 2,048 times; near numbers that "
    "are subtracted keep one or two digits. Library kernels add up in float32, loops written by hand do not.",
    confirm="The module in float32 on the same, rounded inputs: it is right again.",
    fix="Keep the module in float32, or accumulate in float32 (`x.float().sum(1).to(x.dtype)`).",
    reference=AUTOCAST,
)
def unsafe_op_in_half(facts: PrecisionFacts) -> Finding | None:
    guilty = of(facts, "unsafe-op-in-half")
    if not guilty:
        return None
    error = f" by itself its result is off by {guilty[0].error:.0%}" if guilty[0].error > 0.01 else ""
    title = f"{named(guilty[0].module)} is too coarse in {facts.dtype}:" + (
        error or f" with it in half the loss is off by {distance(guilty[0].off)}"
    )
    if guilty[0].raised:
        title = f"{named(guilty[0].module)} does not run in {facts.dtype}: {guilty[0].raised[:120]}"
    inside = Fix("Or accumulate in float32 inside of the module.", "total = x.float().sum(1).to(x.dtype)")
    return finding("precision/unsafe-op-in-half", title + _others(guilty), facts, guilty, None, (inside,))


def _others(guilty: list[Culprit]) -> str:
    others = guilty[1:]
    return f"; likewise {listed([c.module for c in others])}" if others else ""


def name_all(facts: PrecisionFacts) -> list[Finding]:
    """The findings, most likely first: a cause for each kind of fault among the kept modules, then what is around."""
    return [found for rule in rules("precision") if (found := rule.check(facts)) is not None]
