"""From a watched run to its report: the finding, what was ruled out by which number, what was not looked at."""

from __future__ import annotations

from typing import Any

import torch

from nbdebug.chapters.nan.course import CompiledCall
from nbdebug.chapters.nan.facts import CompiledFacts, NanFacts
from nbdebug.chapters.nan.places import at_site
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.remedies import try_fixes
from nbdebug.chapters.nan.repro import Reproduction
from nbdebug.chapters.nan.rules import name_it
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.chapters.nan.verdict import culprit_of, facts_of
from nbdebug.finding import Finding, Report, RuledOut, Where
from nbdebug.observe.state import Snapshot
from nbdebug.observe.tape import Entry
from nbdebug.observe.tensors import all_finite, can_be_bad, finite, tensors_in


def report_of(
    probe: Probe,
    seen: Seen | None,
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
    unchecked = tuple(f"Values inside tensors of type {name}" for name in sorted(probe.recorder.unseen))
    if probe.recorder.blind:
        unchecked = (f"Everything after a fault in nbdebug itself ({probe.recorder.blind})", *unchecked)
    if seen is None:
        found = (name_it(compiled),) if compiled else ()
        return Report(
            question,
            found,
            _ruled_out(probe, None),
            unchecked,
            notes,
            subject,
            {"steps": steps, "history": _history(probe), "met": probe.adopted},
        )
    facts = facts_of(probe, seen)
    record = culprit_of(probe, seen)
    guilty = _op_on_tape(probe, record.op)
    finding, trial = try_fixes(name_it(facts), facts, probe, seen, guilty)
    drawn = {
        "steps": steps,
        "history": _history(probe),
        "met": probe.adopted,
        "exponents": record.numbers.exponents,
        "tree": _tree(probe, finding, facts),
    }
    saver = Reproduction.of(record, guilty or next(iter(record.readers), None), trial, facts)
    return Report(question, (finding,), _ruled_out(probe, facts), unchecked, notes, subject, drawn, saver)


def _op_on_tape(probe: Probe, op: Any) -> Any:
    """The forward op that a replay can change: the op itself, the one whose derivative it computes,
    or its first run."""
    if op is None:
        return None
    op = op.forward if op.during == "backward" and op.forward is not None and not op.custom else op
    recorded = [e.op for e in probe.tape.entries if isinstance(e, Entry)]
    same = [o for o in recorded if o.index == op.index and o.name == op.name and not op.recomputed]
    alike = [o for o in recorded if (o.site, o.name, o.module) == (op.site, op.name, op.module)]
    return next(iter(same + alike), None)


def _notes(probe: Probe, seen: Seen | None) -> list[str]:
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
    memories = list(probe.recorder.memories.values())
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
        "losses": run.losses[-200:],
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
    if not all(all_finite(t) for t in eager if can_be_bad(t)):
        return None
    bad = sum(int((~finite(t)).sum()) for t in made if can_be_bad(t))
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
