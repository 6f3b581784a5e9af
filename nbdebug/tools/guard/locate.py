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

from nbdebug.observe.locations import Site
from nbdebug.observe.replay import Replay
from nbdebug.observe.snapshot import random_sources
from nbdebug.observe.tape import CallEntry, CannotReplay
from nbdebug.observe.tensors import can_be_nonfinite, tensors_in
from nbdebug.report import PHASES, Finding, Report, Where
from nbdebug.tools.guard.rollback import BufferBackup
from nbdebug.tools.guard.trip import Trip
from nbdebug.tools.nan.facts import Target, UnlocatedStep
from nbdebug.tools.nan.locate import NotLocated, locate_origins, uncollected
from nbdebug.tools.nan.nan_trace import eager
from nbdebug.tools.nan.probe import Detection, Probe, RunHistory, StopCell
from nbdebug.tools.nan.report import report_of
from nbdebug.tools.nan.rules import name_it
from nbdebug.tools.nan.suspects import RecordingScan

FINITE = "run again, it was finite"
"""Why a step has no place, where it could be run again."""


def locate(
    trip: Trip,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    *,
    run: RunHistory | None = None,
    question: str = "guard(model, optimizer)",
    subject: str = "",
    redo: Callable[[], Any] | None = None,
) -> Report:
    """The report on a remembered step. models: by the names that the tape knows them by, in the state before that step.

    run: the course of the run until then. redo: what to do after the step's own backward (an optimizer's step that made
    a parameter bad). Nothing raises: a step that can't be replayed, or comes out finite, gets a finding that says so.
    """

    def look(live: bool) -> Report | str:
        probe = Probe(models, optimizers, live=live, named=True)
        probe.history = probe.history if run is None else copy.deepcopy(run)
        with uncollected(), as_before(models, optimizers), eager() as notes:
            scout = RecordingScan(probe) if not live and redo is None else None
            seen = _again(probe, trip, models, redo)
            if seen is not None and not probe.live:
                locate_origins(probe, seen, scout)
            if seen is not None:
                return report_of(probe, seen, question, subject, trip.step + 1, notes=tuple(notes))
        blind = probe.recorder.disabled_by
        hidden = getattr(trip.tape.recorder, "custom_backward", "")
        return f"nbdebug failed ({blind})" if blind else f"outside the model it has {hidden}" if hidden else FINITE

    try:
        try:
            found = look(_on_cpu(models))
        except NotLocated:  # its ops can't be replayed, as where a backward is the user's own: the models' code can
            found = look(True)
    except Exception as reason:  # whatever it is: the step has been stopped, and that must be told
        found = f"it can't be replayed ({type(reason).__name__}: {reason})"
    return found if isinstance(found, Report) else lost(trip, question, subject, found)


def _again(probe: Probe, trip: Trip, models: Mapping[str, nn.Module], redo: Callable[[], Any] | None) -> Any:
    if models and redo is None and not any(isinstance(e, CallEntry) for e in trip.tape.entries):
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
        given = [t for call in trip.inputs for t in tensors_in(call[1:]) if t.dim()]
        probe.taint.origins.batch = given[0].shape[0] if given else None  # known before the first call comes again
        probe.tape.random, probe.tape.cuda_random = trip.tape.random, trip.tape.cuda_random  # a fix is tried on these
        if trip.tape.entries and (redo is None or trip.reason == "parameter"):
            with contextlib.suppress(StopCell):  # the loss is bad: the rest would tell no more
                replay.run()
        recorder.replaying = recorder.called_from = None
        if redo is not None:
            redo()
        seen = probe.end_step()
        return _spoiled_buffer(probe) if seen is None and trip.reason == "buffer" else seen


def _spoiled_buffer(probe: Probe) -> Detection | None:
    """Loss and gradients are finite, and a buffer has gone bad: whence?"""
    buffers = [
        (name, b) for b, (role, name, _) in probe.names.all_tensors() if role == "buffer" and can_be_nonfinite(b)
    ]
    if not probe.live:
        return Detection(Target("buffer", Where(step=probe.step)), set(), len(probe.tape.entries) - 1)
    for name, buffer in buffers:
        origins = {i for i in probe.taint.origins_of(buffer) if probe.taint.origins[i].storage is None}
        if origins:
            return Detection(Target("buffer", Where(step=probe.step), name), origins, len(probe.tape.entries) - 1)
    return None


@contextlib.contextmanager
def as_before(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[None]:
    """Set gradients aside; afterwards they, the buffers and the random numbers are as they were."""
    buffers = BufferBackup(models.values())
    kept = buffers.keep()
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
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        buffers.restore(kept)
        for write, state in random:
            write(state)


def _on_cpu(models: Mapping[str, nn.Module]) -> bool:
    return all(p.device.type == "cpu" for model in models.values() for p in model.parameters())


def lost(trip: Trip, question: str, subject: str, reason: str, look: str = "") -> Report:
    """The report on a step that can't be located, or, with the call that does it, has not been yet."""
    before = [line for line in trip.lines[:-1] if line.outcome == "ok"]
    lost = UnlocatedStep(
        trip.step, trip.sentence(), reason, tuple(x.loss for x in before), tuple(x.norm for x in before), look
    )
    return Report(question, (name_it(lost),), subject=subject, steps=trip.step + 1)


SHARDED = "its parameters are spread over processes, so that none can run it again by itself"


def located(report: Report) -> bool:
    """Whether a report names a place."""
    return report.findings[0].code != "nan/not-located"


def finite(report: Report) -> bool:
    """Whether a process has run its batch again, and found nothing."""
    return not located(report) and report.findings[0].title.endswith(FINITE)


def of_all(trip: Trip, own: Report, everyone: list[Report | None], ranks: Any) -> Report:
    """This process's report, with what the others found. everyone: by the members of the run; None has no answer."""
    told = {rank: report for rank, report in zip(ranks.members, everyone, strict=True) if report is not None}
    told[ranks.rank] = own
    places = [rank for rank, report in told.items() if located(report)]
    by_loss = [rank for rank in trip.bad_ranks if not places or rank not in told or not finite(told[rank])]

    def when(rank: int) -> tuple:
        phase = told[rank].findings[0].where.phase if rank in told else None
        return rank not in by_loss, PHASES.index(phase) if phase in PHASES else len(PHASES), rank

    places.sort(key=when)
    bad = sorted({*by_loss, *places}, key=when)
    leading = (places or bad or [ranks.rank])[0]
    base = told.get(leading, own)
    findings = _of_rank(base.findings, leading if bad else None)
    for rank in places[1:]:
        findings += tuple(f for f in _of_rank(told[rank].findings, rank) if _cause(f) not in map(_cause, findings))
    note = _who(bad, len(ranks.members), bool(by_loss)) if bad else _nobody(told, ranks)
    if caught := [rank for rank in trip.bad_ranks if rank not in bad]:
        note += f" Rank {_listed(caught)} took it over (from statistics of all batches, say): finite by itself."
    trip.bad_ranks = tuple(sorted(bad))
    return dataclasses.replace(
        base,
        subject=own.subject,
        findings=findings,
        notes=(note, *base.notes),
        saver=own.saver if base is own else None,
    )


def of_one(trip: Trip, own: Report, members: tuple[int, ...]) -> Report:
    """This process's report, where the others are not asked."""
    by_loss, here = trip.bad_ranks, located(own)
    if here:
        trip.bad_ranks = tuple(sorted({*by_loss, trip.rank}))  # type: ignore[arg-type]
        note = f"This is what rank {trip.rank} found in its own batch."
    elif by_loss:
        note = _who(list(by_loss), len(members), True) + " Call `trip.locate()` there: it names the place."
    else:
        note = (
            f"Rank {trip.rank} alone names no place: in a run of {len(members)} processes what is not finite may "
            "have come with the gradients of another. Call `trip.locate()` in each of them."
        )
    rank = trip.rank if here else by_loss[0] if by_loss else None
    return dataclasses.replace(own, findings=_of_rank(own.findings, rank), notes=(note, *own.notes))


def _of_rank(findings: tuple[Finding, ...], rank: int | None) -> tuple[Finding, ...]:
    return tuple(dataclasses.replace(f, where=dataclasses.replace(f.where, rank=rank)) for f in findings)


def _cause(finding: Finding) -> tuple:
    where = finding.where
    return finding.code, where.module, where.op, where.file, where.line


def _who(bad: list[int], processes: int, by_loss: bool) -> str:
    """Which process was bad first; `bad` has it first."""
    first = f"Of {processes} processes, rank {bad[0]} was bad first"
    if len(bad) > 1:
        return f"{first}; bad by themselves in the same step: ranks {_listed(sorted(bad))}."
    return f"{first}: its own loss was not finite." if by_loss else f"{first}: the others were finite by themselves."


def _nobody(told: dict[int, Report], ranks: Any) -> str:
    """Why no process is to blame."""
    if ranks.sharded:
        return (
            "Which process was bad first is not known: every loss was finite, and gradients are summed over all "
            "processes before anyone sees them."
        )
    unknown = [rank for rank in ranks.members if rank not in told or not finite(told[rank])]
    if unknown:
        return f"Which process was bad first is not known: rank {_listed(unknown)} could not run its batch again."
    return (
        f"Each of {len(ranks.members)} processes is finite when it runs its own batch again by itself: the fault "
        "is in what they do together (gradients that overflow when they are summed, statistics of all batches), or "
        "the step does not repeat."
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + " and " * (len(ranks) > 1) + str(ranks[-1])
