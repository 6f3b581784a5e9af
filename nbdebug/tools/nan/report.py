"""From a watched run to its report: the finding, what was ruled out by which number, what was not looked at."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nbdebug.observe.locations import at_site
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tape import TapeEntry
from nbdebug.observe.tensors import all_finite, can_be_nonfinite, finite, tensors_in
from nbdebug.report import Finding, Plot, Report, RuledOut, Where
from nbdebug.tools.nan.facts import CompiledFacts, NanFacts, OriginFact, RunFacts
from nbdebug.tools.nan.fixes import try_fixes
from nbdebug.tools.nan.operands import where_of
from nbdebug.tools.nan.origins import Origin
from nbdebug.tools.nan.probe import CompiledCall, Detection, Probe
from nbdebug.tools.nan.reproducer import Reproduction
from nbdebug.tools.nan.rules import name_it

_PHASES = {
    "loss": "forward",
    "returned": "forward",
    "exception": "forward",
    "buffer": "forward",
    "gradient": "backward",
    "parameter": "optimizer",
}


def facts_of(probe: Probe, seen: Detection) -> NanFacts:
    """The facts of one fault."""
    flow = probe.flow
    chosen = [flow.births[i] for i in sorted(flow.births.ancestors(seen.origins))]
    culprit = _culprit(chosen)
    seen = _in_backward(seen, culprit)
    place = {b.index: n for n, b in enumerate(chosen)}
    used = probe.tape.ancestors(seen.position)
    births = tuple(_birth(probe, b, n, place, used) for n, b in enumerate(chosen))
    births = _with_phase(
        births,
        place[culprit.index],
        seen,
        flow.births.batch_size,
        {n for n, b in enumerate(chosen) if b.segment == culprit.segment},
    )
    run = probe.run
    history = RunFacts(
        tuple(run.losses),
        tuple(run.parameter_growth),
        tuple(run.input_growth),
        run.optimizer,
        run.learning_rate,
        run.optimizer_line,
        run.first_step,
    )
    return NanFacts(probe.step, seen.target, births, place[culprit.index], history)


def _in_backward(seen: Detection, culprit: Origin) -> Detection:
    """A parameter updated by hand from a bad gradient: the fault showed in that gradient."""
    made = culprit.op
    if (
        seen.target.kind == "parameter"
        and made is not None
        and (made.during == "backward" or (made.during == "forward" and made.grad))
    ):
        return dataclasses.replace(seen, target=dataclasses.replace(seen.target, kind="gradient"))
    return seen


def culprit_of(probe: Probe, seen: Detection) -> Origin:
    """The birth that is to blame, as the books keep it."""
    return _culprit([probe.flow.births[i] for i in sorted(probe.flow.births.ancestors(seen.origins))])


def _culprit(chosen: list[Origin]) -> Origin:
    """A parameter that was bad already, an input that was bad already, else the earliest birth that nobody intended."""
    unintended = [b for b in chosen if not b.intended] or chosen
    for role in ("parameter", "buffer", "input", "target"):
        outside = [b for b in unintended if b.memory is not None and b.memory.role == role]
        if outside:
            return outside[0]
    return unintended[0]


def _birth(probe: Probe, record: Origin, index: int, place: dict[int, int], used: set[int]) -> OriginFact:
    scene = record.numbers
    external = record.memory.role if record.memory is not None else None
    return OriginFact(
        index=index,
        op=record.op.name if record.op else "",
        made=record.made,
        during=record.op.during if record.op else "forward",
        where=_where(record, used),
        operands=scene.operands,
        scalars=scene.scalars,
        parents=tuple(sorted(place[p] for p in record.parents if p in place)),
        intended=record.intended,
        external=external,
        name=record.memory.name if record.memory else "",
        whole=record.whole,
        custom=record.custom,
        after_model=record.after_model,
        earlier_step=record.step < probe.step,
        step=record.step,
        absorbed_by=tuple(sorted(record.absorbed_by)),
        bad_elements=record.bad,
        elements=_product(record.shape),
        dtype=record.dtype,
        shape=record.shape,
        factors=tuple(record.factors),
    )


def _where(record: Origin, used: set[int]) -> Where:
    """The place of a birth. A tensor that came bad from outside: where it was given to the model, else the first line
    that read it for what went bad (`used`: the ops behind that)."""
    arrived = [set(rows) for index, rows in record.trail if index in used][-1:]
    rows = tuple(sorted(arrived[0] & set(record.rows or arrived[0]))) if arrived else ()
    if record.op is not None:
        return where_of(record.op, samples=rows or record.rows or record.folded)
    memory = record.memory
    assert memory is not None, "what no op made came from outside"
    place = Where(step=record.step, module=memory.module, op="", samples=rows or record.rows)
    if memory.role in ("parameter", "buffer"):
        return place
    readers = [op for op in record.readers if op.index in used] or record.readers
    return at_site(place, memory.entered or (readers[0].site if readers else None))


def _with_phase(
    births: tuple[OriginFact, ...], culprit: int, seen: Detection, batch: int | None, together: set[int]
) -> tuple[OriginFact, ...]:
    """The culprit's place says the phase in which the fault shows, and all rows of its batch that fail on its line."""
    birth = births[culprit]
    phase = _PHASES[seen.target.kind]
    if birth.external is not None:
        phase = "parameter" if birth.external in ("parameter", "buffer") else "input"
    same = [
        b
        for b in births
        if (b.where.file, b.where.line, b.op) == (birth.where.file, birth.where.line, birth.op)
        and not b.intended
        and b.external == birth.external
        and b.index in together
    ]
    rows = {r for b in same for r in b.where.samples or ()}
    samples = tuple(sorted(rows)) if rows and (batch is None or len(rows) < batch) else None
    where = dataclasses.replace(birth.where, phase=phase, samples=samples, step=_step(birth, seen))
    changed = dataclasses.replace(birth, where=where)
    return (*births[:culprit], changed, *births[culprit + 1 :])


def _step(birth: OriginFact, seen: Detection) -> int | None:
    """A gradient that went bad waits for its optimizer in later steps; everything else is dated by when it showed."""
    if seen.target.kind == "gradient" and birth.external is None and birth.during == "backward":
        return birth.where.step
    return seen.target.where.step


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def report_of(
    probe: Probe,
    seen: Detection | None,
    question: str,
    subject: str,
    steps: int,
    compiled: CompiledFacts | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """The report on a run of `steps` steps, of which the last one went bad if there is something `seen`."""
    notes = (*_notes(probe, seen), *notes)
    if probe.adopted:
        subject = f"the model of type {probe.adopted} that was called, and the optimizers that stepped"
    unchecked = tuple(f"Values inside tensors of type {name}" for name in sorted(probe.recorder.opaque_types))
    if probe.recorder.disabled_by:
        unchecked = (f"Everything after a fault in nbdebug itself ({probe.recorder.disabled_by})", *unchecked)
    if seen is None:
        found = (name_it(compiled),) if compiled else ()
        return Report(
            question,
            found,
            _ruled_out(probe, None),
            unchecked,
            notes,
            subject,
            {"history": _history(probe), "met": probe.adopted},
            steps=steps,
            losses=probe.run.losses[-200:],
        )
    facts = facts_of(probe, seen)
    record = culprit_of(probe, seen)
    guilty = _op_on_tape(probe, record.op)
    finding, trial = try_fixes(name_it(facts), facts, probe, seen, guilty)
    saver = Reproduction.of(record, guilty or next(iter(record.readers), None), trial, facts)
    return Report(
        question,
        (finding,),
        _ruled_out(probe, facts),
        unchecked,
        notes,
        subject,
        {"history": _history(probe), "met": probe.adopted},
        saver,
        steps=steps,
        losses=probe.run.losses[-200:],
        plots=(Plot("histogram", record.numbers.exponents), Plot("tree", {"modules": _tree(probe, finding, facts)})),
    )


def _op_on_tape(probe: Probe, op: Any) -> Any:
    """The forward op that a replay can change: the op itself, the one whose derivative it computes,
    or its first run."""
    if op is None:
        return None
    op = op.forward if op.during == "backward" and op.forward is not None and not op.custom else op
    recorded = [e.op for e in probe.tape.entries if isinstance(e, TapeEntry)]
    same = [o for o in recorded if o.index == op.index and o.name == op.name and not op.recomputed]
    alike = [o for o in recorded if (o.site, o.name, o.module) == (op.site, op.name, op.module)]
    return next(iter(same + alike), None)


def _notes(probe: Probe, seen: Detection | None) -> list[str]:
    run, notes = probe.run, []
    if run.scaler_skips:
        notes.append(
            f"GradScaler met inf gradients and skipped {_steps(run.scaler_skips)}: normal while it looks for its scale."
        )
    if run.guarded:
        notes.append(
            f"In {_steps(run.guarded)} something was not finite; your code looked, and the optimizer did not step."
        )
    buffers = [
        name
        for model in probe.names.models.values()
        for name, b in model.named_buffers()
        if any(
            not birth.intended and birth.memory is None
            for birth in map(probe.flow.births.__getitem__, probe.flow.origins(b))
        )
    ]
    if buffers and seen is None:
        named = ", ".join(f"`{b}`" for b in buffers[:3])
        notes.append(f"The loss is still finite, but the buffer {named} is not: it will show when that buffer is used.")
    if seen is None and not run.losses and not probe.backward_runs:
        notes.append("No backward was seen: only what the step returned was judged.")
    if probe.compiled:
        notes.append(
            "Compiled modules ran in eager, so that every op could be seen"
            + ("." if seen or probe.cell else "; their compiled form was compared on the same batches.")
        )
    return notes


def _steps(numbers: list[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:5]) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"step{'s' if len(numbers) > 1 else ''} {shown}"


def _ruled_out(probe: Probe, facts: NanFacts | None) -> tuple[RuledOut, ...]:
    """Causes that were looked for and are not there, each with its number."""
    code = facts.birth.external if facts else None
    memories = list(probe.recorder.storages.values())
    count = {role: sum(m.role == role for m in memories) for role in ("parameter", "buffer", "input")}
    bad = {b.memory.role for b in probe.flow.births if b.memory is not None and not b.intended}
    out = []
    weights = count["parameter"] + count["buffer"]
    if weights and not bad & {"parameter", "buffer"}:
        looked = _all(weights, "parameter or buffer", "parameters and buffers")
        out.append(RuledOut("bad weights", f"{looked} finite before the step"))
    if count["input"] and "input" not in bad and code != "input":
        looked = _all(count["input"], "tensor given to the model", "tensors given to the model")
        out.append(RuledOut("bad input", f"{looked} finite"))
    losses = probe.run.losses
    largest = max((abs(x) for x in losses[:-1]), default=0.0)
    if facts is not None and len(losses) > 1 and largest <= 2 * abs(losses[0]):
        out.append(
            RuledOut("a diverging run", f"the losses before stayed within {largest:.4g} (first: {losses[0]:.4g})")
        )
    if probe.flow.births:
        harmless = sum(b.intended for b in probe.flow.births)
        if harmless:
            out.append(RuledOut("intended infinities", f"{harmless} came from masks and were left alone"))
    return tuple(out)


def _all(count: int, one: str, many: str) -> str:
    return f"the one {one} was" if count == 1 else f"all {count} {many} were"


def _history(probe: Probe) -> dict[str, Any]:
    run = probe.run
    return {
        "parameter_growth": run.parameter_growth[-200:],
        "input_growth": run.input_growth[-200:],
    }


def _tree(probe: Probe, finding: Finding, facts: NanFacts) -> list[dict[str, Any]]:
    """Every module: was the bad value born there, did it go through there on its way to what went bad?"""
    born = finding.where.module
    through = {b.where.module for b in facts.descendants} | {born} | probe.flow.touched
    return [
        {"name": name, "type": kind, "born": name == born, "path": name in through}
        for name, kind in probe.names.types()
    ]


def compare_compiled(probe: Probe, call: CompiledCall, step: int) -> CompiledFacts | None:
    """Run a compiled module, and its eager self, on the batch that it was given; only the compiled one bad is a
    finding.

    Buffers and random numbers are put back afterwards.
    """
    before = Snapshot.take({"model": call.module})
    try:
        with torch.no_grad():
            with torch.compiler.set_stance("force_eager"):
                eager = tensors_in(call.module(*call.args, **call.kwargs))
            before.restore()
            with torch.compiler.set_stance("default"):
                made = tensors_in(call.module(*call.args, **call.kwargs))
    finally:
        before.restore()
    if not all(all_finite(t) for t in eager if can_be_nonfinite(t)):
        return None
    bad = sum(int((~finite(t)).sum()) for t in made if can_be_nonfinite(t))
    if not bad:
        return None
    eager_module = getattr(call.module, "_orig_mod", call.module)
    return CompiledFacts(
        step,
        probe.names.of(call.module) or "",
        type(eager_module).__name__,
        bad,
        sum(t.numel() for t in made),
        at_site(Where(), call.site),
    )
