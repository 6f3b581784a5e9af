"""Scenes in which the guard of rank 1 has a fault of its own: one of its functions raises from a given step on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import nbdebug
from tests.nan.guard.kinds import changed
from tests.nan.guard.planted import planted
from tests.nan.guard.processes import Stage, scene
from tests.nan.guard.ranks_ddp import BAD, Training

_GUARD = "nbdebug.tools.guard."
CHOSEN = ["nbdebug.observe.tensors:total_norm"] + [
    _GUARD + place
    for place in (
        "distributed:Ranks.table",
        "distributed:Ranks.combine",
        "distributed:Ranks.model_called",
        "finite_check:CheckResult.reason",
        "step:StepTracker.model_called",
        "step:StepTracker.before_update",
        "step:StepTracker.after_update",
        "step:StepTracker.backward_begins",
        "finite_check:read_check",
        "step:GuardedStep.note_result",
        "guard:Guard.note_step",
        "rollback:BufferBackup.take",
    )
]
IN_A_TRIP = [
    _GUARD + place
    for place in (
        "guard:Guard._report_trip",
        "rollback:BufferBackup.restore",
        "locate:locate",
        "locate:restored",
        "guard:Locator._own",
        "locate:report_of_all",
        "locate:_of_rank",
        "distributed:without_communication",
    )
]


@scene
def in_healthy_steps(stage: Stage) -> dict[str, Any]:
    bare = Training(stage)
    for i in range(6):
        bare.step(i)
    told = {}
    for place in CHOSEN:
        print(place, flush=True)
        training = Training(stage)
        with planted(place) as fault, training.guard() as guard:
            for i in range(6):
                fault.armed = i >= 2 and stage.rank == 1
                training.step(i)
            fault.armed = False
        told[place] = fault.calls, guard.fault, changed(bare.kept(), training.kept())
    return told


@scene
def in_a_bad_step(stage: Stage) -> dict[str, Any]:
    """Rank 1 has the bad batch, too."""
    told = {}
    for place in IN_A_TRIP:
        for on_trip in ("trace", "record", "skip"):
            print(place, on_trip, flush=True)
            training, error = Training(stage, {1: "loss"}), None
            with planted(place) as fault, training.guard(on_trip=on_trip) as guard:
                for i in range(BAD):
                    training.step(i)
                before, fault.armed = training.kept(), stage.rank == 1
                try:
                    training.step(BAD)
                except nbdebug.NonFiniteStep as stopped:
                    error = stopped
                fault.armed = False
                after = training.kept()
                if on_trip != "trace":
                    training.step(BAD + 1)
                    training.step(BAD + 2)
            told[f"{place}, {on_trip}"] = fault.calls, guard.fault, error is not None, not changed(before, after)
    return told


@scene
def with_a_grad_scaler(stage: Stage) -> dict[str, Any]:
    """The guard of rank 1 has its fault while GradScaler skips steps."""
    told = {}
    for place in (
        _GUARD + "finite_check:StepCheck.of_scaler_skip",
        _GUARD + "step:StepTracker.scaler_updates",
        "nbdebug.observe.tensors:total_norm",
    ):
        training = Training(stage)
        scaler = torch.amp.GradScaler(stage.device.type, init_scale=2.0**127, growth_interval=100)
        with planted(place) as fault, training.guard(scaler=scaler) as guard:
            for i in range(8):
                fault.armed = i >= 1 and stage.rank == 1
                training.optimizer.zero_grad()
                scaler.scale(training.loss(i) * 1e4).backward()
                scaler.step(training.optimizer)
                scaler.update()
            fault.armed = False
        told[place] = fault.calls, guard.fault, training.kept()
    return told


@scene
def with_a_closure(stage: Stage) -> dict[str, Any]:
    told = {}
    for place in (
        "step:StepTracker.before_update",
        "step:StepTracker.backward_begins",
        "rollback:UpdateBackup.judge",
        "step:StepTracker.after_update",
    ):
        training = Training(stage, None, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2))

        def closure(training: Training = training) -> torch.Tensor:
            training.optimizer.zero_grad()
            loss = training.loss(0)
            loss.backward()
            return loss

        with planted(_GUARD + place) as fault, training.guard() as guard:
            for i in range(5):
                fault.armed = i >= 2 and stage.rank == 1
                training.optimizer.step(closure)
            fault.armed = False
        told[place] = fault.calls, guard.fault
    return told


@scene
def what_follows(stage: Stage) -> dict[str, Any]:
    """Once all guards have left, another guard can be made, and works."""
    training = Training(stage, {1: "loss"})
    first = training.guard(on_trip="skip")
    with planted("nbdebug.observe.tensors:total_norm") as fault:
        fault.armed = stage.rank == 1
        training.step(0), training.step(1), training.step(2)
    first.close()
    with contextlib.suppress(nbdebug.NonFiniteStep), training.guard() as guard:
        training.step(BAD)
    return {"first": first.fault, "bad": guard.trips[-1].bad_ranks}
