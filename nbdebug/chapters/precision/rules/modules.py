"""Rules over the modules that have to be kept: why each of them does not do in half precision.

A module's ops tell first: a value beyond the dtype, then a constant or values that became zero. Where none stands out,
two experiments have told: inputs and buffers rounded and all else in float32 (still wrong: the cast has lost it), or
not (the arithmetic loses it).
"""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.precision.facts import Culprit, Event, PrecisionFacts
from nbdebug.chapters.precision.rules.words import distance, kept_fix, listed, named, short
from nbdebug.finding import Finding, Fix, Link, Where

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


def first(culprit: Culprit, *kinds: str) -> Event | None:
    return next((event for event in culprit.events if event.what in kinds), None)


def finding(
    code: str, title: str, facts: PrecisionFacts, guilty: list[Culprit], event: Event | None, fixes: tuple[Fix, ...]
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


def _told(event: Event, facts: PrecisionFacts) -> str:
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
