"""From a watched run to its report: facts, finding, tried fix, what was ruled out by which number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.locations import at_site
from nbdebug.observe.ops import named_arguments, schema_of
from nbdebug.observe.recorder import Op
from nbdebug.observe.replay import Replay
from nbdebug.observe.tape import Ref, TapeEntry
from nbdebug.observe.tensors import StorageInfo, all_finite, can_be_nonfinite, finite, storage_key, tensors_in
from nbdebug.report import Finding, Item, Plot, Report, RuledOut, Symptom, Where
from nbdebug.text import count, figures, listed
from nbdebug.tools.nan.facts import CompiledFacts, NanFacts, OriginFact, RunFacts, StateFacts
from nbdebug.tools.nan.fixes import try_fixes
from nbdebug.tools.nan.origins import EMPTIES, Origin, where_of
from nbdebug.tools.nan.probe import CompiledCall, Detection, Probe
from nbdebug.tools.nan.reproducer import Reproduction
from nbdebug.tools.nan.rules import name_it
from nbdebug.tools.nan.rules.wording import numbered
from nbdebug.tools.nan.taint import COMPARES
from nbdebug.tools.nan.trials import Trial, count_bad
from nbdebug.verdict import blind, of_losses

_PHASES = {
    "loss": "forward",
    "returned": "forward",
    "exception": "forward",
    "buffer": "forward",
    "gradient": "backward",
    "parameter": "optimizer",
}
_MOST_ROWS = 8
"""Rows that are tried one by one."""


def report_of(
    probe: Probe,
    detection: Detection | None,
    question: str,
    subject: str,
    steps: int,
    compiled: CompiledFacts | None = None,
    notes: tuple[str, ...] = (),
    again: Trial | None = None,
) -> Report:
    """The report on a run of `steps` steps, of which the last one went bad if there is a detection. again: that step by
    the user's own code, where it can run once more."""
    notes = (*_notes(probe, detection), *notes)
    if probe.adopted:
        subject = f"the model of type {probe.adopted} that was called, and the optimizers that stepped"
    unchecked = tuple(f"Values inside tensors of type {name}" for name in sorted(probe.recorder.opaque_types))
    if probe.recorder.disabled_by:
        unchecked = (f"Everything after a fault in nbdebug itself ({probe.recorder.disabled_by})", *unchecked)
    report = Report(
        question,
        unchecked=unchecked,
        notes=notes,
        subject=subject,
        facts={
            "history": {
                "parameter_growth": probe.history.parameter_growth[-200:],
                "input_growth": probe.history.input_growth[-200:],
            },
            "met": probe.adopted,
        },
        symptoms=_symptoms(probe, detection),
        steps=steps,
        losses=probe.history.losses[-200:],
    )
    if detection is None:
        report.findings = (name_it(compiled),) if compiled else ()
        report.ruled_out = _ruled_out(probe, None)
        return report
    finding, facts, culprit = cause_of(probe, detection)
    dropped = finding.code == "nan/where-grad" and culprit.op is None
    reader = _reader(culprit, probe.tape.ancestors(detection.position)) if dropped else None
    op = _op_on_tape(probe, culprit.op or reader)
    finding, trial = try_fixes(finding, facts, probe, detection, culprit, op, again)
    report.findings, report.ruled_out = (finding,), _ruled_out(probe, facts)
    report.plots = (
        Plot("histogram", culprit.snapshot.exponents),
        Plot("tree", {"modules": _tree(probe, finding, facts)}),
    )
    report.saver = Reproduction.of(culprit, op or next(iter(culprit.readers), None), trial, facts)
    return report


def cause_of(probe: Probe, detection: Detection) -> tuple[Finding, NanFacts, Origin]:
    """The cause by name, its facts, and the origin that is to blame; no fix is tried."""
    origins = probe.taint.origins
    chosen = [origins[i] for i in sorted(origins.ancestors(detection.origins))]  # all that led there, oldest first
    culprit = _culprit(chosen)
    facts = _facts(probe, detection, chosen, culprit)
    return name_it(facts), facts, culprit


def compare_compiled(probe: Probe, call: CompiledCall, step: int) -> CompiledFacts | None:
    """Run a compiled module, and its eager self, on the batch that it was given; only the compiled one bad is a
    finding. Buffers and random numbers are put back afterwards."""
    from nbdebug.observe.snapshot import Snapshot  # only a compiled model needs it

    before = Snapshot.take({"model": call.module})
    try:
        with torch.no_grad():
            with torch.compiler.set_stance("force_eager"):
                eager = tensors_in(call.module(*call.args, **call.kwargs))
            before.restore()
            with torch.compiler.set_stance("default"):
                compiled = tensors_in(call.module(*call.args, **call.kwargs))
    finally:
        before.restore()
    if not all(all_finite(t) for t in eager if can_be_nonfinite(t)):
        return None
    bad = sum(int((~finite(t)).sum()) for t in compiled if can_be_nonfinite(t))
    if not bad:
        return None
    eager_module = getattr(call.module, "_orig_mod", call.module)
    return CompiledFacts(
        step,
        probe.names.of(call.module) or "",
        type(eager_module).__name__,
        bad,
        sum(t.numel() for t in compiled),
        at_site(Where(), call.site),
    )


# -- facts -------------------------------------------------------------------------------------------------------------


def _culprit(chosen: list[Origin]) -> Origin:
    """A parameter that was bad already, an input that was bad already, else the earliest origin that nobody
    intended."""
    unintended = [o for o in chosen if not o.intended] or chosen
    for role in ("parameter", "buffer", "input", "target"):
        external = [o for o in unintended if o.storage is not None and o.storage.role == role]
        if external:
            return external[0]
    return unintended[0]


def _facts(probe: Probe, detection: Detection, chosen: list[Origin], culprit: Origin) -> NanFacts:
    detection = _in_backward(detection, culprit)
    place = {o.index: n for n, o in enumerate(chosen)}
    used = probe.tape.ancestors(detection.position)
    origins = [_origin_fact(probe, o, n, place, used) for n, o in enumerate(chosen)]
    index = place[culprit.index]
    together = [fact for fact, o in zip(origins, chosen, strict=True) if o.segment == culprit.segment]
    where = _where_it_shows(origins[index], together, detection, probe.taint.origins.batch_size)
    if culprit.op is not None:
        where = dataclasses.replace(
            where, samples=_settled_rows(probe, detection, culprit, chosen, used, where.samples)
        )
    where = dataclasses.replace(where, items=_items(probe, culprit, where.samples))
    origins[index] = dataclasses.replace(origins[index], where=where)
    history = probe.history
    run = RunFacts(
        tuple(history.losses),
        tuple(history.parameter_growth),
        tuple(history.input_growth),
        history.optimizer,
        history.learning_rate,
        history.optimizer_line,
        history.first_step,
        min(probe.backward_runs, len(history.losses)),
        history.nonfinite_settings,
    )
    return NanFacts(probe.step, detection.target, tuple(origins), index, run, _state(probe))


def _items(probe: Probe, culprit: Origin, rows: tuple[int, ...] | None) -> tuple[Item, ...] | None:
    """The items of the data set that these rows are, of all rows of a small batch where the fault is in all."""
    log, batch = probe.batches.log, probe.taint.origins.batch_size
    if log is None or not probe.inputs or rows is None and batch != 1:
        return None
    op = culprit.op or next(iter(culprit.readers), None)
    before = [inputs for number, inputs in probe.inputs if op is None or number <= (op.forward or op).index]
    with _disable_current_modes():
        return log.items((before or [probe.inputs[0][1]])[-1], rows or (0,), batch, probe.latest_batch)


def _state(probe: Probe) -> StateFacts:
    """The parameters and buffers that were bad before the step."""
    external = [o for o in probe.taint.origins if o.storage is not None and not o.intended]
    bad = [o.storage.name for o in external if o.storage is not None and o.storage.role in ("parameter", "buffer")]
    tensors = sum(can_be_nonfinite(t) for t, _ in probe.names.all_tensors())
    finite_steps = sum(map(math.isfinite, probe.history.losses[: -probe.backward_runs or None])) if probe.step else 0
    return StateFacts(tuple(dict.fromkeys(bad)), tensors, probe.trained, finite_steps)


def _in_backward(detection: Detection, culprit: Origin) -> Detection:
    """A parameter updated by hand from a bad gradient: the fault showed in that gradient."""
    op = culprit.op
    if (
        detection.target.kind == "parameter"
        and op is not None
        and (op.during == "backward" or (op.during == "forward" and op.grad))
    ):
        return dataclasses.replace(detection, target=dataclasses.replace(detection.target, kind="gradient"))
    return detection


def _origin_fact(probe: Probe, origin: Origin, index: int, place: dict[int, int], used: set[int]) -> OriginFact:
    op, storage = origin.op, origin.storage
    ahead = op is not None and (op.loading or op.ahead and origin.step == probe.step - 1)  # for the next step
    return OriginFact(
        index=index,
        op=op.name if op else "",
        made=origin.made,
        during=op.during if op else "forward",
        where=_where(origin, used),
        operands=origin.snapshot.operands,
        scalars=origin.snapshot.scalars,
        parents=tuple(sorted(place[p] for p in origin.parents if p in place)),
        intended=origin.intended,
        external=storage.role if storage else None,
        name=storage.name if storage else "",
        whole=origin.whole,
        custom=origin.custom,
        after_model=origin.after_model,
        earlier_step=origin.step < probe.step and not ahead,
        step=probe.step if ahead else origin.step,
        absorbed_by=tuple(sorted(origin.absorbed_by)),
        bad_elements=origin.bad,
        elements=math.prod(origin.shape),
        dtype=origin.dtype,
        shape=origin.shape,
        factors=tuple(origin.factors),
        reader=reader.name if (reader := _reader(origin, used)) else "",
        **_read_as(probe, storage, reader),
    )


def _read_as(probe: Probe, storage: StorageInfo | None, reader: Op | None) -> dict[str, Any]:
    """Of a tensor from outside: the argument that it is of the op that reads it, and which of its elements are bad."""
    entries = [e for e in probe.tape.entries if isinstance(e, TapeEntry) and not e.unfit]
    entry = next((e for e in entries if reader is not None and e.op.index == reader.index), None)
    if storage is None or entry is None:
        return {}
    for name, value in named_arguments(schema_of(entry.op.func), entry.args, entry.kwargs):
        held = probe.tape.externals.get(value.value) if isinstance(value, Ref) else None
        if held is not None and storage_key(held.tensor) == storage.ref.cdata:
            bad = ~finite(held.tensor) if held.tensor.dim() == 1 else held.tensor.new_empty(0)
            return {"argument": name, "numbers": tuple(bad.nonzero().flatten().tolist())}
    return {}


def _reader(origin: Origin, used: set[int]) -> Op | None:
    """The first op that used a tensor from outside for what went bad; one that only asks for its values (`isnan`) where
    there is no other."""
    readers = [op for op in origin.readers if op.index in used] or origin.readers
    return next(iter([op for op in readers if op.name not in COMPARES] or readers), None)


def _where(origin: Origin, used: set[int]) -> Where:
    """The place of an origin. A tensor that was bad from outside: where it was given to the model, else the first line
    that read it for what went bad (`used`: the ops behind that). Of an item of the batch: the row that it became."""
    if origin.op is not None and origin.op.loading and origin.trail:
        return where_of(origin.op, samples=origin.trail[0][1])
    trail = origin.trail if origin.op is None or origin.op.name in EMPTIES else []
    arrived = [set(rows) for index, rows in trail if index in used][-1:]
    rows = tuple(sorted(arrived[0] & set(origin.rows or arrived[0]))) if arrived else ()
    storage = origin.storage
    if origin.op is not None:
        place = where_of(origin.op, samples=rows or origin.rows or origin.folded_rows)
        return place if storage is None else dataclasses.replace(place, op="")  # written into the model's input
    assert storage is not None, "what no op made came from outside"
    place = Where(step=origin.step, module=storage.module, op="", samples=rows or origin.rows)
    if storage.role in ("parameter", "buffer"):
        return place
    reader = _reader(origin, used)
    return at_site(place, storage.entered or (reader.site if reader else None))


def _where_it_shows(
    origin: OriginFact, together: Iterable[OriginFact], detection: Detection, batch: int | None
) -> Where:
    """The culprit's place, with the phase and the step in which the fault shows, and all rows of its batch that fail
    on its line. together: the origins of the same batch."""
    target, phase, step = detection.target, _PHASES[detection.target.kind], detection.target.where.step
    if origin.external is not None:
        phase = "parameter" if origin.external in ("parameter", "buffer") else "input"
    elif target.kind == "gradient" and origin.during == "backward":
        step = origin.where.step  # a bad gradient may wait for its optimizer in later steps
    line = origin.where.file, origin.where.line, origin.op, origin.external
    same = [o for o in together if (o.where.file, o.where.line, o.op, o.external) == line and not o.intended]
    rows = {r for o in same for r in o.where.samples or ()}
    samples = tuple(sorted(rows)) if rows and (batch is None or len(rows) < batch) else None
    return dataclasses.replace(origin.where, phase=phase, samples=samples, step=step)


# -- rows: a dimension is taken for the batch by its size, which is no proof where another one has the same size; and of
# several rows that made an infinity, some may be harmless. A replay with rows of the batch replaced by another tells.


def _settled_rows(
    probe: Probe,
    detection: Detection,
    culprit: Origin,
    chosen: Iterable[Origin],
    used: set[int],
    rows: tuple[int, ...] | None,
) -> tuple[int, ...] | None:
    """The rows at fault. culprit: the origin to blame; chosen: all that led to what went bad; used: the ops behind it;
    rows: what the sizes of dimensions tell."""
    op, batch = culprit.op, probe.taint.origins.batch_size
    assert op is not None, "a tensor from outside has its own rows"
    together = [
        o
        for o in chosen
        if o.op is not None
        and not o.intended
        and (o.op.site, o.op.name, o.segment) == (op.site, op.name, culprit.segment)
    ]
    swaps = _RowSwaps(probe, detection, batch or 0)
    if batch and _unclear(probe, together, batch):
        rows = _by_replay(swaps, together, rows)
    reached = {row for o in together for index, trail in o.trail if index in used for row in trail}
    if rows and 1 < len(rows) <= _MOST_ROWS and reached and not set(rows) <= reached:
        guilty = tuple(row for row in rows if not swaps.cure({*rows} - {row}))
        rows = guilty if guilty and not swaps.failed else rows
    return rows


def _unclear(probe: Probe, together: list[Origin], batch: int) -> bool:
    """Whether another dimension has the batch's size, or may hold the batch folded."""
    if not any(o.row_sets for o in together):
        return False
    return (
        any(rows != (o.rows or o.folded_rows) for o in together for rows in o.row_sets.values())
        or batch in probe.taint.origins.folds
        or any(batch in t.shape for t, _ in probe.names.all_tensors())
    )


def _by_replay(swaps: _RowSwaps, together: list[Origin], rows: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The smallest set of rows without which the step is finite; None where there is none."""
    keys = dict.fromkeys(key for o in together for key in o.row_sets)
    sets = {tuple(sorted({row for o in together for row in o.row_sets.get(key, ())})) for key in keys}
    for candidate in sorted(sets, key=len):
        if len(candidate) < swaps.batch and swaps.cure(candidate):
            return candidate
    if rows is None or swaps.failed or swaps.reads_values:
        return rows
    others = range(swaps.batch)  # the rows matter, and it is not these: each takes part, as in a mean over the batch
    return None if any(swaps.cure({*others} - {row}) for row in others[:3]) else rows


class _RowSwaps:
    """Replays of the failing step with rows of the batch replaced by another row, in all tensors from outside that have
    a dimension of its size. failed: whether one could not be run. reads_values: whether the step's Python code reads
    values of tensors, which a replay has as numbers: other rows don't change them."""

    def __init__(self, probe: Probe, detection: Detection, batch: int):
        self.tape, self.detection, self.batch, self.failed = probe.tape, detection, batch, False
        ops = [e.op for e in probe.tape.entries[: detection.position] if isinstance(e, TapeEntry) and not e.unfit]
        self.reads_values = any(op.name == "local_scalar_dense" for op in ops)
        self._numbers = [
            number
            for number, held in probe.tape.externals.items()
            if not held.leaf
            and held.grad_of is None
            and batch in held.tensor.shape
            and (held.storage is None or held.storage.role not in ("parameter", "buffer"))
        ]

    def cure(self, rows: Iterable[int]) -> bool:
        """Whether what went bad is finite without these rows."""
        rows = sorted(rows)
        donor = next(row for row in range(self.batch) if row not in rows)

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.clone()
            by_row = tensor.movedim(tensor.shape.index(self.batch), 0)
            by_row[rows] = by_row[donor].clone()
            return tensor

        kind = self.detection.target.kind
        replay = Replay(self.tape, inputs=dict.fromkeys(self._numbers, swap), keep=self.detection.ref)
        try:
            replay.run(self.detection.position, forward_only=kind == "loss")
        except Exception:  # an op that depends on how many rows there are, or little memory: no telling
            self.failed = True
            return False
        results = {"loss": replay.losses, "gradient": replay.gradients.values(), "parameter": replay.leaves.values()}
        values = results.get(kind, [] if replay.value is None else [replay.value])
        return bool(values) and not count_bad(values)


# -- the op on the tape ------------------------------------------------------------------------------------------------


def _op_on_tape(probe: Probe, op: Any) -> Any:
    """The forward op that a replay can change: the op itself, the one whose derivative it computes,
    or its first run."""
    if op is None:
        return None
    op = op.forward if op.during == "backward" and op.forward is not None and not op.custom else op
    recorded = [e.op for e in probe.tape.entries if isinstance(e, TapeEntry)]
    same = [o for o in recorded if o.index == op.index and o.name == op.name and not o.recomputed]
    alike = [o for o in recorded if (o.site, o.name, o.module) == (op.site, op.name, op.module)]
    return next(iter(same + alike), None)


# -- what stands beside the finding ------------------------------------------------------------------------------------


def _notes(probe: Probe, detection: Detection | None) -> list[str]:
    history, notes = probe.history, []
    if history.scaler_skips:
        skips = numbered("step", history.scaler_skips)
        notes.append(f"GradScaler found inf gradients and skipped {skips}: normal while it looks for its scale.")
    if history.guarded:
        notes.append(
            f"In {numbered('step', history.guarded)} something was not finite; your code checked it, and the optimizer "
            "did not step."
        )
    if detection is None and not history.losses and not probe.backward_runs:
        notes.append("There was no backward: only what the step returned was checked.")
    if probe.spilled:
        notes.append("The device had too little memory left: the step ran again with its activations in the host's.")
    if probe.compiled:
        notes.append(
            "Compiled modules ran in eager mode, so that every op could be seen"
            + ("." if detection or probe.cell else "; their compiled form was compared on the same batches.")
        )
    return notes


def _symptoms(probe: Probe, detection: Detection | None) -> list[Symptom]:
    """What is not well, beside what a rule has named."""
    found = of_losses(probe.history.losses, several=probe.history.optimizers > 1, resumed=True)
    if detection is None and (buffers := _bad_buffers(probe)):
        names = f"buffer {listed(buffers)} is" if len(buffers) == 1 else f"buffers {listed(buffers)} are"
        found.append(Symptom(f"The loss is still finite, but the {names} not.", "It shows as soon as that is used."))
    if fault := probe.recorder.disabled_by:
        found.append(blind("The ops after a fault of nbdebug's own", fault))
    return found


def _bad_buffers(probe: Probe) -> list[str]:
    """Buffers that an op of the run has made bad."""
    origins = probe.taint.origins
    return [
        name
        for model in probe.names.models.values()
        for name, buffer in model.named_buffers()
        if any(not o.intended and o.storage is None for o in map(origins.__getitem__, probe.taint.origins_of(buffer)))
    ]


def _ruled_out(probe: Probe, facts: NanFacts | None) -> tuple[RuledOut, ...]:
    """Causes that were looked for and are not there, each with its number."""
    storages = list(probe.recorder.storages.values())
    weights, inputs = (sum(s.role in roles for s in storages) for roles in (("parameter", "buffer"), ("input",)))
    bad = {o.storage.role for o in probe.taint.origins if o.storage is not None and not o.intended}
    ruled_out = []
    if weights and not bad & {"parameter", "buffer"}:
        tensors = _all(weights, "parameter or buffer", "parameters and buffers")
        ruled_out.append(RuledOut("bad weights", f"{tensors} finite before the step"))
    if inputs and "input" not in bad and not (facts is not None and facts.origin.external == "input"):
        ruled_out.append(RuledOut("bad input", f"{_all(inputs, 'model input', 'model inputs')} finite"))
    losses = probe.history.losses
    largest = max((abs(x) for x in losses[:-1]), default=0.0)
    if facts is not None and len(losses) > 1 and largest <= 2 * abs(losses[0]):
        earlier = f"earlier losses were no larger than {figures(largest)} (the first: {figures(losses[0])})"
        ruled_out.append(RuledOut("a diverging run", earlier))
    masks = sum(o.intended for o in probe.taint.origins)
    if masks:
        ruled_out.append(
            RuledOut("intended infinities", f"{count(masks, 'op')} wrote infinities as a mask, on purpose")
        )
    return tuple(ruled_out)


def _all(number: int, one: str, many: str) -> str:
    if number == 1:
        return f"the only {one} was"
    return f"{'both' if number == 2 and ' and ' not in many else f'all {number:,}'} {many} were"


def _tree(probe: Probe, finding: Finding, facts: NanFacts) -> list[dict[str, Any]]:
    """Every module: is the origin there, did the bad value go through there on its way to what went bad?"""
    born = finding.where.module
    through = {o.where.module for o in facts.descendants} | {born} | probe.taint.modules
    return [
        {"name": name, "type": kind, "born": name == born, "path": name in through}
        for name, kind in probe.names.types()
    ]
