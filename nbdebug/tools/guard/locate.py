"""Run a remembered step again under the NaN tracer, and name what first made the bad value.

The step runs from the models' own code, with the parameters, buffers, random numbers and inputs that it had. Whatever
that leaves behind (gradients, buffers, random numbers) is put back.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.interrupts import uncollected
from nbdebug.observe.locations import Site
from nbdebug.observe.modules import eager
from nbdebug.observe.replay import Replay
from nbdebug.observe.snapshot import Snapshot, random_sources
from nbdebug.observe.sources import edited_functions
from nbdebug.observe.tape import CallEntry, CannotReplay, Tape
from nbdebug.observe.tensors import can_be_nonfinite, tensors_in
from nbdebug.report import PHASES, Edit, Finding, Report, Where
from nbdebug.tools.guard.rollback import BufferBackup, UpdateBackup, before_overwritten
from nbdebug.tools.guard.step import Trip
from nbdebug.tools.nan.facts import Target, UnlocatedStep
from nbdebug.tools.nan.fixes import Cure
from nbdebug.tools.nan.locate import (
    TOO_LITTLE,
    NotEnoughMemory,
    NotLocated,
    activations_on_host,
    free_memory,
    locate_origins,
)
from nbdebug.tools.nan.probe import Detection, Probe, RunHistory, StopCell
from nbdebug.tools.nan.report import report_of
from nbdebug.tools.nan.rules import name_it
from nbdebug.tools.nan.rules.wording import numbered
from nbdebug.tools.nan.suspects import RecordingScan
from nbdebug.tools.nan.trials import Outcome, count_bad, error_text

FINITE = "when it runs again, it is finite"
"""Why a step has no place, where it could be run again."""
SHARDED = "its parameters are sharded over processes, so no process can run it again by itself"


def locate(
    trip: Trip,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    *,
    history: RunHistory | None = None,
    question: str = "guard(model, optimizer)",
    subject: str = "",
    redo: Callable[[], Any] | None = None,
    backup: UpdateBackup | None = None,
    batches: Any = None,
) -> Report:
    """The report on a remembered step. models: by the names that the tape knows them by, in the state before that step.

    history: the run until then. backup: of an optimizer's step that made a parameter bad; that is made again after the
    step's own backward, or, with a closure, runs the whole step by itself. redo: makes it where there is no backup.
    batches: the ItemLog of what loaders gave.
    Nothing raises: a step that can't be replayed, or is finite then, gets a finding that says so.
    """
    redo, undo = (redo, None) if backup is None else (backup.redo, backup.restore)
    closure = backup is not None and backup.closure

    def trace(live: bool, spilled: bool) -> Report | str:
        probe = Probe(models, optimizers, live=live, named=True)
        probe.history = probe.history if history is None else copy.deepcopy(history)
        probe.batches.log, probe.latest_batch, probe.spilled = batches, not trip.late, spilled
        scan = RecordingScan(probe) if not live and redo is None else None
        closing = contextlib.closing(scan) if scan is not None else contextlib.nullcontext()
        with uncollected(), closing, restored(models, optimizers, trip.tape), eager() as notes:
            detection = _run_step(probe, trip, models, redo, closure)
            if detection is not None and not probe.live:
                locate_origins(probe, detection, scan)
            if detection is not None:
                again = RecordedTrial(trip, models, optimizers, redo, undo, closure)
                return report_of(probe, detection, question, subject, trip.step + 1, notes=tuple(notes), again=again)
        if isinstance(probe.recorder.fault, torch.OutOfMemoryError):
            raise NotEnoughMemory(TOO_LITTLE)
        fault = probe.recorder.disabled_by
        unseen = getattr(trip.tape.recorder, "custom_backward", "")
        return f"nbdebug failed ({fault})" if fault else f"outside the model it has {unseen}" if unseen else FINITE

    def search(spilled: bool) -> Report | str:
        try:
            report = trace(False, spilled)
            if report == FINITE:  # perhaps it read memory that nobody had written, where something else lies now
                trip.tape.unwritten_as_nan = True
                report = trace(False, spilled)
        except NotEnoughMemory:
            raise
        except NotLocated:  # its ops can't be replayed, as where a backward is the user's own: the models' code can
            if undo is not None:
                undo()
            report = trace(True, spilled)
        return report

    report = _with_what_memory_there_is(search, backup)
    return report if isinstance(report, Report) else not_located(trip, question, subject, report)


def _with_what_memory_there_is(search: Callable[[bool], Report | str], backup: UpdateBackup | None) -> Report | str:
    """The report, or why there is none; searched with activations and backup in the host's memory where the device's
    is too little. Nothing raises: the step has been stopped, and that must be reported."""
    for spilled in (False, True):
        try:
            with activations_on_host() if spilled else contextlib.nullcontext():
                return search(spilled)
        except (torch.OutOfMemoryError, NotEnoughMemory):
            pass  # what it held is freed with this exception
        except Exception as reason:
            return f"it can't be replayed ({type(reason).__name__}: {reason})"
        if backup is not None:
            backup.move_to_host()
        free_memory()
    return TOO_LITTLE


def not_located(trip: Trip, question: str, subject: str, reason: str, locate_call: str = "") -> Report:
    """The report on a step that can't be located, or, with the call that does it, has not been yet."""
    finding = name_it(UnlocatedStep.of_trip(trip, reason, locate_call))
    return Report(question, (finding,), subject=subject, steps=trip.step + 1)


def _run_step(
    probe: Probe, trip: Trip, models: Mapping[str, nn.Module], redo: Callable[[], Any] | None, closure: bool
) -> Detection | None:
    """Run the step again under the probe."""
    called = trip.tape.transformed or any(isinstance(e, CallEntry) for e in trip.tape.entries)
    if models and redo is None and not called:
        raise CannotReplay("no call of the model was seen in it, perhaps because the code around it is compiled")
    recorder = probe.recorder

    def on_line(site: Site | None) -> None:
        recorder.called_from = site

    def on_op(op: Any) -> None:
        recorder.replaying = op

    replay = Replay(trip.tape, models=models, on_op=on_op, on_line=on_line)
    with probe:
        probe.begin_step(trip.step)
        probe.without_optimizer = True
        inputs = [t for call in trip.inputs for t in tensors_in(call[1:]) if t.dim()]
        probe.taint.origins.batch = inputs[0].shape[0] if inputs else None  # known before the first call is repeated
        probe.tape.random, probe.tape.cuda_random = trip.tape.random, trip.tape.cuda_random  # a fix is tried on these
        if trip.tape.entries and not closure and (redo is None or trip.reason == "parameter"):
            with contextlib.suppress(StopCell):  # the loss is bad: the rest would tell no more
                replay.run()
        recorder.replaying = recorder.called_from = None
        if redo is not None:
            redo()
        detection = probe.end_step()
        return _bad_buffer(probe) if detection is None and trip.reason == "buffer" else detection


def _bad_buffer(probe: Probe) -> Detection | None:
    """Loss and gradients are finite, and a buffer is not: the detection of that."""
    target, position = Target("buffer", Where(step=probe.step)), len(probe.tape.entries) - 1
    if not probe.live:
        return Detection(target, set(), position)
    origins = probe.taint.origins
    for buffer, (role, name, _) in probe.names.all_tensors():
        if role == "buffer" and can_be_nonfinite(buffer):
            from_ops = {i for i in probe.taint.origins_of(buffer) if origins[i].storage is None}
            if from_ops:
                return Detection(dataclasses.replace(target, name=name), from_ops, position)
    return None


class RecordedTrial:
    """A `StepTrial` of the recorded step: from the models' own code as edited, or with a setting that the edit gives an
    object made before the step."""

    def __init__(
        self,
        trip: Trip,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        redo: Callable[[], Any] | None,
        undo: Callable[[], Any] | None,
        closure: bool,
    ):
        self.trip, self.models, self.optimizers = trip, models, optimizers
        self.redo, self.undo, self.closure = redo, undo, closure
        self.why_not = ""
        self._fails = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[RecordedTrial]:
        yield self

    def run(self, edit: Edit, cure: Cure) -> Outcome:
        """Run it as edited. What the tape has proven, and what needs the run from its start, is left alone."""
        if cure.whole_run or (cure.setting is None and cure.change is not None and cure.exact):
            return Outcome(False, False)
        with contextlib.ExitStack() as stack:
            exchanged = stack.enter_context(edited_functions(edit))
            if not exchanged and cure.setting is None:
                return Outcome(False, False)
            outcome = self._run(cure.setting or contextlib.nullcontext)
        if outcome.cured and not self._fails:
            self._fails = not self._run(contextlib.nullcontext).cured
            self.why_not = "" if self._fails else "the step is finite when it runs again: it does not repeat"
        # of edited code it is not known whether the recorded step runs it, unless it helps
        ran = not self.why_not and (outcome.cured or cure.setting is not None)
        return outcome._replace(ran=ran)

    def _run(self, setting: Callable[[], contextlib.AbstractContextManager]) -> Outcome:
        before = Snapshot.take(dict(self.models), dict(self.optimizers))
        try:
            if self.undo is not None:
                self.undo()
            parameters = [p for o in self.optimizers.values() for group in o.param_groups for p in group["params"]]
            for p in (*parameters, *(p for model in self.models.values() for p in model.parameters())):
                p.grad = None
            with setting():
                replay = Replay(self.trip.tape, models=self.models)
                if self.trip.tape.entries and not self.closure:
                    replay.run()
                tensors = [*replay.losses, *(p.grad for p in parameters if p.grad is not None)]
                if self.redo is not None:
                    self.redo()
                    tensors += parameters
                loss = float(replay.losses[-1]) if replay.losses and replay.losses[-1].numel() == 1 else None
                return Outcome(True, not count_bad(tensors), 1, loss=loss)
        except Exception as error:  # the edited text does not run
            return Outcome(True, False, why_not=error_text(error))
        finally:
            before.restore()


@contextlib.contextmanager
def restored(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], tape: Tape
) -> Iterator[None]:
    """Take gradients away; afterwards they, the buffers, the random numbers and the parameters that the tape writes to
    are as they were."""
    buffers = BufferBackup(models.values())
    copies = buffers.take()
    random = [(write, read()) for _, read, write in random_sources()]
    parameters = [
        *(p for model in models.values() for p in model.parameters()),
        *(p for o in optimizers.values() for group in o.param_groups for p in group["params"]),
    ]
    parameters = list({id(p): p for p in parameters}.values())
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        with before_overwritten(tape, models.values()):
            yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        buffers.restore(copies)
        for write, state in random:
            write(state)


# -- several processes -------------------------------------------------------------------------------------------------


def has_place(report: Report) -> bool:
    """Whether a report names a place."""
    return report.findings[0].code != "nan/not-located"


def is_finite(report: Report) -> bool:
    """Whether a process has run its batch again, and found nothing."""
    return not has_place(report) and report.findings[0].title.endswith(FINITE)


def report_of_all(trip: Trip, own: Report, everyone: list[Report | None], ranks: Any) -> Report:
    """This process's report, with what the others found. everyone: by the members of the run; None has no answer."""
    reports = {rank: report for rank, report in zip(ranks.members, everyone, strict=True) if report is not None}
    reports[ranks.rank] = own
    places = [rank for rank, report in reports.items() if has_place(report)]
    by_loss = [rank for rank in trip.bad_ranks if not places or rank not in reports or not is_finite(reports[rank])]

    def when(rank: int) -> tuple:
        phase = reports[rank].findings[0].where.phase if rank in reports else None
        return rank not in by_loss, PHASES.index(phase) if phase in PHASES else len(PHASES), rank

    places.sort(key=when)
    bad = sorted({*by_loss, *places}, key=when)
    first = (places or bad or [ranks.rank])[0]
    base = reports.get(first, own)
    findings = _of_rank(base.findings, first if bad else None)
    for rank in places[1:]:
        findings += tuple(f for f in _of_rank(reports[rank].findings, rank) if _cause(f) not in map(_cause, findings))
    note = _first_bad(bad, len(ranks.members), bool(by_loss)) if bad else _none_bad(reports, ranks)
    if inherited := [rank for rank in trip.bad_ranks if rank not in bad]:
        note += (
            f" {_ranks(inherited).capitalize()} got it from another process (such as statistics of all batches): "
            "finite when run alone."
        )
    trip.bad_ranks = tuple(sorted(bad))
    return dataclasses.replace(
        base,
        subject=own.subject,
        findings=findings,
        notes=(note, *base.notes),
        saver=own.saver if base is own else None,
    )


def report_of_one(trip: Trip, own: Report, members: tuple[int, ...]) -> Report:
    """This process's report, where the others are not asked."""
    by_loss, here = trip.bad_ranks, has_place(own)
    if here:
        trip.bad_ranks = tuple(sorted({*by_loss, trip.rank}))  # type: ignore[arg-type]
        note = f"This is what rank {trip.rank} found in its own batch."
    elif by_loss:
        note = _first_bad(list(by_loss), len(members), True) + " Call `trip.locate()` there: it names the place."
    else:
        note = (
            f"Rank {trip.rank} alone names no place: in a run of {len(members)} processes the bad values may "
            "have come with the gradients of another. Call `trip.locate()` in each of them."
        )
    rank = trip.rank if here else by_loss[0] if by_loss else None
    return dataclasses.replace(own, findings=_of_rank(own.findings, rank), notes=(note, *own.notes))


def _of_rank(findings: tuple[Finding, ...], rank: int | None) -> tuple[Finding, ...]:
    return tuple(dataclasses.replace(f, where=dataclasses.replace(f.where, rank=rank)) for f in findings)


def _cause(finding: Finding) -> tuple:
    where = finding.where
    return finding.code, where.module, where.op, where.file, where.line


def _first_bad(bad: list[int], processes: int, by_loss: bool) -> str:
    """Which process was bad first; `bad` has it first."""
    first = f"Of {processes} processes, rank {bad[0]} was bad first"
    if len(bad) > 1:
        return f"{first}; {_ranks(sorted(bad))} were bad independently in the same step."
    return f"{first}: its own loss was not finite." if by_loss else f"{first}: the others are finite when run alone."


def _none_bad(reports: dict[int, Report], ranks: Any) -> str:
    """Why no process is to blame."""
    if ranks.sharded:
        return (
            "Which process was bad first is not known: every loss was finite, and gradients are summed over all "
            "processes before they can be checked."
        )
    unknown = [rank for rank in ranks.members if rank not in reports or not is_finite(reports[rank])]
    if unknown:
        return f"Which process was bad first is not known: {_ranks(unknown)} could not run its batch again."
    return (
        f"Each of {len(ranks.members)} processes is finite when it runs its own batch again alone: the fault "
        "is in what they do together (gradients that overflow when they are summed, statistics of all batches), or "
        "the step does not repeat."
    )


def _ranks(ranks: list[int]) -> str:
    return numbered("rank", ranks, most=len(ranks))
