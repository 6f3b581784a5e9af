"""From the facts to the report: the set, its proof by tries, every module's sizes, the cost of the mixed model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from nbdebug.report import Plot, Report, RuledOut, Table
from nbdebug.text import size
from nbdebug.tools.precision.facts import HalfStep, PrecisionFacts
from nbdebug.tools.precision.rules import distance, listed, name_all, named, short

FLOAT32_OFF = 1e-3
"""Relative distance of float32 from float64 from which it is told as a doubt about the reference: our choice. Healthy
steps were off by 1e-6 and less, and half precision's own errors begin at 1e-3."""


@dataclasses.dataclass(repr=False)
class PrecisionReport(Report):
    """A Report that knows the set. fp32_modules: names of the modules that must stay in float32, in the model's order;
    ("",) is the whole model."""

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        return tuple(self.facts.get("fp32_modules", ()))


def report_of(facts: PrecisionFacts, mode: str, model: Any) -> PrecisionReport:
    """The report on one search."""
    return PrecisionReport(
        f'precision(model, batch, loss_fn, "{facts.dtype}", mode="{mode}")',
        tuple(name_all(facts)),
        _ruled_out(facts),
        _unchecked(facts),
        _notes(facts),
        f"a model of type {type(model).__name__}",
        {"fp32_modules": list(facts.kept), "tries": len(facts.tries)},
        headline=_headline(facts),
        tables=_tables(facts),
        plots=(Plot("ranges", _ranges(facts)),),
    )


def _headline(facts: PrecisionFacts) -> str:
    if not facts.float32.finite:
        return "The step is not finite in float32 either: %nan_trace names the op that does it."
    if not facts.kept and facts.order is not None:
        return (
            "No module needs float32; what is wrong is the order of the step. "
            f"In {facts.dtype} the loss is off by {distance(facts.half.off)}."
        )
    if not facts.kept:
        return f"Nothing needs float32: in {facts.dtype} the loss is off by {distance(facts.half.off)}."
    if facts.kept == ("",):
        return f"No part of the model will do in {facts.dtype}: all of it, or its own code, needs float32."
    count = len(facts.kept)
    said = f"{count} module{'s' * (count != 1)} must stay in float32: {listed(facts.kept, 8)}"
    return f"{said} ({len(facts.tries)} tries; " + (
        "taking any one out fails)." if facts.minimal else f"not shown to be the smallest set: {_why(facts)})."
    )


def _why(facts: PrecisionFacts) -> str:
    return facts.stopped or "some tries contradict each other"


def _ruled_out(facts: PrecisionFacts) -> tuple[RuledOut, ...]:
    out = []
    fine = [m for m in facts.modules if m.leaf and not m.broken and m.name not in facts.kept and m.largest]
    if fine:
        near = max(fine, key=lambda m: m.largest)
        out.append(
            RuledOut(
                "an overflow in the outputs of other modules",
                f"the largest value is {short(near.largest)} (`{near.name}`), {facts.dtype} ends at "
                f"{short(facts.largest)}",
            )
        )
    if facts.scaling is None and facts.half.finite:
        out.append(RuledOut("gradients that vanish", "every parameter with a gradient in float32 has one"))
    return tuple(out)


def _unchecked(facts: PrecisionFacts) -> tuple[str, ...]:
    said = list(facts.unchecked)
    if facts.half.error:
        said.append(f"The step in {facts.dtype} as it is: it raised {facts.half.error}")
    if not facts.minimal and facts.kept:
        said.append(f"Whether a smaller set would do: {_why(facts)}")
    return tuple(said)


def _notes(facts: PrecisionFacts) -> tuple[str, ...]:
    notes = [
        f"In float32 the loss is {short(facts.float32.loss)}, in {facts.dtype} "
        + (short(facts.half.loss) if not facts.half.error else "there is none")
        + (f"; {len(facts.half.bad)} gradients are not finite" if facts.half.bad else "")
        + "."
    ]
    if facts.exact is not None:
        notes.append(_float32(facts))
    if facts.mixed is not None:
        notes.append(_cost(facts.mixed, facts.float32, "with these modules in float32"))
        notes.append(
            "The same without nbdebug, around the call of each of these modules: "
            "`with torch.autocast(x.device.type, enabled=False): y = module(x.float()).to(x.dtype)`."
        )
    elif facts.half.finite:
        notes.append(_cost(facts.half, facts.float32, f"in {facts.dtype}"))
    return tuple(notes)


def _cost(step: HalfStep, plain: HalfStep, how: str) -> str:
    said = f"A step {how} took {1000 * step.seconds:.0f} ms, in float32 {1000 * plain.seconds:.0f} ms"
    if step.memory is not None and plain.memory:
        said += f"; its peak memory was {size(step.memory)} against {size(plain.memory)}"
    return said + "."


def _float32(facts: PrecisionFacts) -> str:
    """How good the reference is."""
    exact = facts.exact
    assert exact is not None
    said = f"{_tiny(exact.off)} in the loss and {_tiny(exact.norm_off)} in the norm of all gradients"
    if max(exact.off, exact.norm_off) <= FLOAT32_OFF:
        return (
            f"float32 is good enough as the reference: against float64 it is off by {said} (the float64 step, with "
            f"float32 beside each module, took {1000 * exact.seconds:.0f} ms)."
        )
    worst = max(exact.errors, key=lambda name: exact.errors[name], default=None)
    at = f", most by its own work in {named(worst)} ({_tiny(exact.errors[worst])})" if worst is not None else ""
    return (
        f"float32 is itself off from float64 by {said}{at}: what half precision adds is told from float32, and the "
        "modules named here may need float64."
    )


def _tiny(off: float) -> str:
    return f"{off:.1%}" if off >= 1e-3 else f"{off:.0e}" if off > 0 else "nothing"


def _tables(facts: PrecisionFacts) -> list[Table]:
    tried = [
        [
            i,
            ", ".join(t.kept[:6]) + (f" and {len(t.kept) - 6} more" if len(t.kept) > 6 else "") or "nothing",
            "works" if t.worked else "fails",
            distance(t.off),
        ]
        for i, t in enumerate(facts.tries, 1)
    ]
    return [
        Table(
            "What was tried",
            ("try", "kept in float32", "the step", "loss off by"),
            tried,
            f"A step works when all is finite and the loss is within {facts.tolerance:.0%} of float32's.",
        ),
        _costs(facts),
        _modules(facts),
    ]


def _costs(facts: PrecisionFacts) -> Table:
    """Time and memory of the mixed step, between all in half and all in float32."""
    steps = [("all in float32", facts.float32), (f"all in {facts.dtype}", facts.half)]
    if facts.mixed is not None:
        steps.append(("as found: " + listed(facts.kept) + " in float32", facts.mixed))
    known = [(how, step) for how, step in steps if not step.error]
    memory = all(step.memory is not None for _, step in known)
    rows = [[how, 1000 * step.seconds, *[step.memory] * memory, step.loss, distance(step.off)] for how, step in known]
    columns = ["the step", "ms", *["peak memory (bytes)"] * memory, "loss", "loss off by"]
    note = "Forward and backward of all batches, the better of two runs" + (
        "; peak memory above what was held before." if memory else ". Memory is measured on an accelerator only."
    )
    return Table("What a step costs", columns, rows, note)


def _modules(facts: PrecisionFacts) -> Table:
    """Headroom and errors, module by module."""
    double = facts.exact is not None
    rows = [
        [
            m.name,
            m.kind,
            m.largest,
            facts.largest / m.largest if m.largest else None,
            100 * m.tiny,
            100 * m.error,
            *([None if m.float32_error is None else 100 * m.float32_error] * double),
            "yes" if m.broken else "",
            m.gradient,
            100 * m.gradient_tiny,
        ]
        for m in facts.modules
    ]
    columns = [
        "module",
        "type",
        "largest output",
        "times below the end",
        "too small, %",
        "own error, %",
        *["own float32 error, %"] * double,
        "breaks",
        "largest gradient",
        "gradient too small, %",
    ]
    return Table(
        "Every module, against the ends of the dtype",
        columns,
        rows,
        f"Values in float32; {facts.dtype} ends at {short(facts.largest)}; too small: below its smallest "
        f"normal number, {short(facts.tiny)}. Own error: of the module's output in half on the same "
        "inputs, relative" + (", and in float32 against float64." if double else "."),
    )


def _ranges(facts: PrecisionFacts) -> dict[str, Any]:
    """For the picture: exponents of every leaf's values, with what overflowed inside of a kept one, and of its
    gradients."""

    def powers(low: float, high: float) -> list[float] | None:
        return [math.log2(low), math.log2(high)] if 0 < low <= high < math.inf else None

    inner = {c.module: max([e.size for e in c.events if e.what == "overflow"], default=0.0) for c in facts.culprits}
    leaves = [m for m in facts.modules if m.leaf or m.name in facts.kept]
    return {
        "dtype": facts.dtype,
        "modules": [
            {
                "name": m.name,
                "values": powers(m.smallest, max(m.largest, inner.get(m.name, 0.0))),
                "kept": m.name in facts.kept,
                "gradient": math.log2(m.gradient) if 0 < m.gradient < math.inf else None,
            }
            for m in leaves
        ],
    }
