"""Run a remembered step again under the NaN tracer, and name what first made the bad value.

The step runs from the models' own code, with the parameters, buffers, random numbers and inputs that it had. Whatever
that leaves behind (gradients, buffers, random numbers) is put back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.nan.account import report_of
from nbdebug.chapters.nan.alongside import Alongside
from nbdebug.chapters.nan.course import Run, StopCell
from nbdebug.chapters.nan.facts import LostStep, Target
from nbdebug.chapters.nan.guard.buffers import Buffers
from nbdebug.chapters.nan.guard.trip import Trip
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.relive import NotLocated, relive, uncollected
from nbdebug.chapters.nan.rules import name_it
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.chapters.nan.trace import eager
from nbdebug.finding import Report, Where
from nbdebug.observe.replay import Replay
from nbdebug.observe.sites import Site
from nbdebug.observe.state import sources
from nbdebug.observe.tape import CallEntry, Unfit
from nbdebug.observe.tensors import can_be_bad, tensors_in

FINITE = "run again, it was finite"
"""Why a step has no place, where it could be run again."""


def locate(
    trip: Trip,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    *,
    run: Run | None = None,
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
        probe.run = probe.run if run is None else copy.deepcopy(run)
        with uncollected(), as_before(models, optimizers), eager() as notes:
            scout = Alongside(probe) if not live and redo is None else None
            seen = _again(probe, trip, models, redo)
            if seen is not None and not probe.live:
                relive(probe, seen, scout)
            if seen is not None:
                return report_of(probe, seen, question, subject, trip.step + 1, notes=tuple(notes))
        blind = probe.recorder.blind
        hidden = getattr(trip.tape.recorder, "hidden", "")
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
        raise Unfit("no call of the model was seen in it, perhaps because the code around it is compiled")
    recorder = probe.recorder

    def on_line(site: Site | None) -> None:
        recorder.called_from = site

    def on_op(op: Any) -> None:
        recorder.replaying = op

    replay = Replay(trip.tape, models=models, on_op=on_op, on_line=on_line)
    with probe:
        probe.begin_step(trip.step)
        probe.about_to_step = True
        given = [t for call in trip.inputs for t in tensors_in(call[1:]) if t.dim()]
        probe.flow.births.batch = given[0].shape[0] if given else None  # known before the first call comes again
        probe.tape.random, probe.tape.cuda_random = trip.tape.random, trip.tape.cuda_random  # a fix is tried on these
        if trip.tape.entries and (redo is None or trip.reason == "parameter"):
            with contextlib.suppress(StopCell):  # the loss is bad: the rest would tell no more
                replay.run()
        recorder.replaying = recorder.called_from = None
        if redo is not None:
            redo()
        seen = probe.end_step()
        return _spoiled_buffer(probe) if seen is None and trip.reason == "buffer" else seen


def _spoiled_buffer(probe: Probe) -> Seen | None:
    """Loss and gradients are finite, and a buffer has gone bad: whence?"""
    buffers = [(name, b) for b, (role, name, _) in probe.names.all_tensors() if role == "buffer" and can_be_bad(b)]
    if not probe.live:
        return Seen(Target("buffer", Where(step=probe.step)), set(), len(probe.tape.entries) - 1)
    for name, buffer in buffers:
        origins = {i for i in probe.flow.origins(buffer) if probe.flow.births[i].memory is None}
        if origins:
            return Seen(Target("buffer", Where(step=probe.step), name), origins, len(probe.tape.entries) - 1)
    return None


@contextlib.contextmanager
def as_before(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[None]:
    """Set gradients aside; afterwards they, the buffers and the random numbers are as they were."""
    buffers = Buffers(models.values())
    kept = buffers.keep()
    random = [(write, read()) for _, read, write in sources()]
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
    lost = LostStep(
        trip.step, trip.sentence(), reason, tuple(x.loss for x in before), tuple(x.norm for x in before), look
    )
    return Report(question, (name_it(lost),), subject=subject, facts={"steps": trip.step + 1})
