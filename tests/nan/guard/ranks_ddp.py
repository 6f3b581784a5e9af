"""Scenes of two processes that train a model with DistributedDataParallel; one of them gets a bad batch."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import nbdebug
from tests.nan.guard.kinds import kept
from tests.nan.guard.processes import Stage, scene
from tests.nan.leftovers import assert_nothing_is_left, hooks_of

ROWS, WIDTH, STEPS, BAD = 5, 4, 8, 3
OPTIMIZERS = {
    "cpu": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "cuda": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Network(nn.Module):
    """Running statistics that differ from process to process, and masks drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.drop, self.head = (
            nn.Linear(WIDTH, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.3),
            nn.Linear(6, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.stem(x)))))


class Training:
    """One process's part. faults: what is wrong with the batch of step BAD, by rank: "loss" (a log of zero), "gradient"
    (a square root at zero: the loss is finite)."""

    def __init__(
        self,
        stage: Stage,
        faults: dict[int, str] | None = None,
        make: Callable | None = None,
        wrap: bool = True,
        **given: Any,
    ) -> None:
        torch.manual_seed(0)
        self.stage, self.fault = stage, (faults or {}).get(stage.rank, "")
        self.inner = Network().to(stage.device)
        self.model = DDP(self.inner, **given) if wrap else self.inner
        self.optimizer = (make or OPTIMIZERS[stage.device.type])(self.inner.parameters())
        draw = torch.Generator().manual_seed(1 + stage.rank)
        self.inputs = torch.randn(40, ROWS, WIDTH, generator=draw).to(stage.device)
        self.weights = torch.ones(40, ROWS, 1).to(stage.device)
        self.weights[BAD, 3] = 0.0
        torch.manual_seed(5 + stage.rank)

    def loss(self, i: int) -> torch.Tensor:
        level = self.model(self.inputs[i]).square() + 0.1
        if self.fault == "loss":
            return -torch.log(level * self.weights[i]).mean()  # the loss at fault
        if self.fault == "gradient":
            return torch.sqrt(level * self.weights[i]).mean()  # the gradient at fault
        return level.mean()

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        self.loss(i).backward()
        self.optimizer.step()

    def kept(self) -> dict[str, Any]:
        return kept([self.inner], [self.optimizer])

    def guard(self, **given: Any) -> nbdebug.tools.guard.guard.Guard:
        return nbdebug.guard(self.model, self.optimizer, **given)


def told_of(report: Any) -> dict[str, Any]:
    """What a report says, as plain data."""
    return {
        "text": str(report),
        "notes": report.notes,
        "findings": [
            (f.code, f.where.rank, f.where.op, f.where.phase, (f.where.text or "").strip(), f.where.samples)
            for f in report.findings
        ],
    }


def run(training: Training, steps: int = STEPS, **given: Any) -> dict[str, Any]:
    """Train under a guard, to the end or until it raises."""
    before, error, guard = training.kept(), None, training.guard(**given)
    try:
        with guard:
            for i in range(steps):
                before = training.kept() if i <= BAD else before
                training.step(i)
    except nbdebug.NonFiniteStep as tripped:
        error = tripped
    assert_nothing_is_left()
    assert hooks_of(training.inner) == 0
    told = (
        {"error": None}
        if error is None
        else {
            "error": (error.step, error.trip.reason, error.trip.late),
            "rank": error.trip.rank,
            "bad": error.trip.bad_ranks,
            "message": str(error),
            "report": None if error.report is None else told_of(error.report),
        }
    )
    return {
        **told,
        "before": before,
        "after": training.kept(),
        "steps": guard.steps,
        "skipped": guard.skipped,
        "outcomes": [line.outcome for line in guard.lines],
        "norms": [line.norm for line in guard.lines],
        "losses": [line.loss for line in guard.lines],
        "clipped": guard.clipped,
        "fault": guard.fault,
        "trips": [(t.step, t.reason, t.bad_ranks, t.report and told_of(t.report)) for t in guard.trips],
    }


FAULTS = {
    "loss of 1": {1: "loss"},
    "loss of 0": {0: "loss"},
    "gradient of 1": {1: "gradient"},
    "both": {0: "loss", 1: "loss"},
    "later and first": {0: "gradient", 1: "loss"},
}
if not os.environ.get("NBDEBUG_ALL_TESTS"):  # each of them is trained with each of the policies
    FAULTS = {kind: FAULTS[kind] for kind in ("loss of 1", "gradient of 1")}
POLICIES = ("trace", "raise", "skip", "record")


@scene
def trips(stage: Stage) -> dict[str, Any]:
    return {
        f"{on_trip}, {kind}": run(Training(stage, faults), on_trip=on_trip)
        for (kind, faults), on_trip in itertools.product(FAULTS.items(), POLICIES)
    }


@scene
def dropped(stage: Stage) -> dict[str, Any]:
    """The same steps without a guard; what the bad one did is undone by hand, but for the random numbers drawn."""
    return {kind: by_hand(Training(stage, FAULTS[kind])) for kind in ("loss of 1", "gradient of 1")}


def by_hand(training: Training) -> dict[str, Any]:
    for i in range(STEPS):
        if i != BAD:
            training.step(i)
            continue
        before = [b.clone() for b in training.inner.buffers()]
        training.optimizer.zero_grad()
        training.loss(i).backward()
        for buffer, value in zip(training.inner.buffers(), before, strict=True):
            buffer.copy_(value)
    return training.kept()


@scene
def healthy(stage: Stage) -> dict[str, Any]:
    """How much it talks, and whether it changes anything."""
    bare, guarded, talk, talked = Training(stage), Training(stage), dist.all_reduce, []
    torch.manual_seed(5 + stage.rank)
    for i in range(STEPS):
        bare.step(i)

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        talked.append(tensor.shape)
        return talk(tensor, *args, **kwargs)

    torch.manual_seed(5 + stage.rank)
    dist.all_reduce = counted
    try:
        told = run(guarded)
    finally:
        dist.all_reduce = talk
    return {
        "bare": bare.kept(),
        "guarded": told["after"],
        "talked": len(talked),
        "steps": told["steps"],
        "report": told["error"],
    }


@scene
def by_hand_in_one_process(stage: Stage) -> Any:
    """Each process asks for the cause at another time, or never; nobody waits for it."""
    training = Training(stage, {1: "gradient"})
    with training.guard(on_trip="raise"):
        try:
            for i in range(STEPS):
                training.step(i)
        except nbdebug.NonFiniteStep as error:
            trip = error.trip
    told = told_of(trip.locate()) if stage.rank == 1 else None
    dist.barrier()
    return told or told_of(trip.locate())


@scene
def the_model_inside(stage: Stage) -> Any:
    """The guard is given what is inside of the DDP; and is made before the DDP is."""
    training = Training(stage, {1: "loss"})
    inside = nbdebug.guard(training.inner, training.optimizer)
    first = stop(training, inside)
    early = Training(stage, {1: "loss"}, wrap=False)
    guard = nbdebug.guard(early.inner, early.optimizer)
    early.model = DDP(early.inner)
    return [first, stop(early, guard)]


def stop(training: Training, guard: Any) -> dict[str, Any]:
    with contextlib.suppress(nbdebug.NonFiniteStep), guard:
        for i in range(STEPS):
            training.step(i)
    return {
        "steps": guard.steps,
        "trips": [(t.step, t.bad_ranks, told_of(t.report)) for t in guard.trips],
        "after": training.kept(),
    }


@scene
def a_statistic_of_one_process(stage: Stage) -> Any:
    """A running variance overflows in one process; its loss and all gradients are finite."""
    training = Training(stage, wrap=False)
    training.inner.stem.requires_grad_(False)
    training.model = DDP(training.inner, broadcast_buffers=False)
    if stage.rank == 1:
        training.inputs[BAD, 0] = 1e21
    return run(training, on_trip="trace")


@scene
def many_batches_a_step(stage: Stage) -> Any:
    """Gradients are accumulated, and averaged in the last backward of a step only."""
    told = {}
    for kind in ("loss", "gradient"):
        training = Training(stage, {1: kind})

        def step(i: int, training: Training = training) -> None:
            training.optimizer.zero_grad()
            for k in range(3):
                last = k == 2
                with contextlib.nullcontext() if last else training.model.no_sync():
                    (training.loss(i + 10 * (k != 1)) / 3).backward()
            training.optimizer.step()

        training.step = step  # type: ignore[method-assign]
        told[kind] = run(training)
    return told


@scene
def clipped_and_dropped(stage: Stage) -> Any:
    bare = Training(stage)
    torch.manual_seed(5 + stage.rank)
    norms = []
    for i in range(STEPS):
        bare.optimizer.zero_grad()
        bare.loss(i).backward()
        norms.append(nn.utils.clip_grad_norm_(bare.inner.parameters(), 0.05).item())
        bare.optimizer.step()
    clipped = run(Training(stage), max_grad_norm=0.05)
    return {
        "bare": bare.kept(),
        "norms": norms,
        "clipped": clipped,
        "above": run(Training(stage), skip_above=sorted(norms)[2], on_trip="skip"),
    }


class Steep(torch.autograd.Function):
    """The same values; a gradient that overflows at a large scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1e35


@scene
def scaled(stage: Stage) -> Any:
    """With a GradScaler: an overflow in one process's gradients is normal, a NaN loss is not."""
    told = {}
    for kind in ("steep", "loss"):
        training = Training(stage, {1: "loss"} if kind == "loss" else None)
        scaler = torch.amp.GradScaler(stage.device.type, init_scale=2.0**16)

        def step(i: int, training: Training = training, scaler: Any = scaler, kind: str = kind) -> None:
            training.optimizer.zero_grad()
            loss = training.loss(i)
            if kind == "loss" and stage.rank == 1 and i == BAD:
                loss = loss - loss  # inf - inf
            if kind == "steep" and stage.rank == 1 and i == BAD:
                loss = Steep.apply(loss)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()

        training.step = step  # type: ignore[method-assign]
        told[kind] = {**run(training, scaler=scaler), "scale": scaler.get_scale()}
    return told


@scene
def with_a_closure(stage: Stage) -> Any:
    training = Training(stage, {1: "loss"}, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2))
    training.inner.drop.p = 0.0

    def step(i: int) -> None:
        def closure() -> torch.Tensor:
            training.optimizer.zero_grad()
            loss = training.loss(i)
            loss.backward()
            return loss

        training.optimizer.step(closure)

    training.step = step  # type: ignore[method-assign]
    return run(training)


@scene
def in_half_precision(stage: Stage) -> Any:
    """The update itself divides by an eps that rounds to zero."""
    training = Training(stage, None, lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False))
    training.inner.half()
    training.model = DDP(training.inner)
    training.inputs = training.inputs.half() * 1e-3
    return run(training, on_trip="trace")


@scene
def uneven_batches(stage: Stage) -> Any:
    """One process has fewer batches, and joins; what is bad before and after that is stopped in those that go on."""
    told = {}
    for kind, faults in {"healthy": {}, "gradient of 0": {0: "gradient"}}.items():
        training = Training(stage, faults)
        with training.guard(on_trip="skip") as guard, training.model.join():
            for i in range(STEPS if stage.rank == 0 else 2):
                training.step(i)
        told[kind] = {"steps": guard.steps, "skipped": guard.skipped, "after": training.kept(), "fault": guard.fault}
    return told


@scene
def a_guard_in_one_process_only(stage: Stage) -> Any:
    from nbdebug.tools.guard import distributed as ranks

    ranks.WAIT_SECONDS = 0.5
    try:
        training, plain = Training(stage), Training(stage)
        for i in range(STEPS):
            plain.step(i)
        torch.manual_seed(5 + stage.rank)
        with training.guard() if stage.rank == 0 else contextlib.nullcontext() as guard:
            for i in range(STEPS):
                training.step(i)
    finally:
        ranks.WAIT_SECONDS = 30.0
    return {"same": plain.kept() == training.kept(), "steps": guard.steps if guard else None}


@scene
def an_evaluation_in_one_process(stage: Stage) -> Any:
    """After each step rank 0 evaluates the model, and rank 1 waits for it at a barrier."""
    training = Training(stage, {1: "loss"})
    train = training.step

    def step(i: int) -> None:
        train(i)
        if stage.rank == 0:
            with torch.no_grad():
                training.inner.eval()(training.inputs[i])
            training.inner.train()
        dist.barrier()

    training.step = step  # type: ignore[method-assign]
    return run(training)


@scene
def losses_averaged_for_a_log(stage: Stage) -> Any:
    """Between forward and backward, and between steps, the processes talk of what is no part of the step."""
    training = Training(stage, {1: "loss"})

    def step(i: int) -> None:
        batch = torch.tensor([i], device=stage.device)
        dist.broadcast(batch, 0)
        training.optimizer.zero_grad()
        loss = training.loss(int(batch.item()))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        loss.backward()
        training.optimizer.step()
        dist.all_reduce(mean)

    training.step = step  # type: ignore[method-assign]
    return run(training)


class Talking(nn.Module):
    """A model that gathers what the other process has, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x)
        total = y.detach().clone()
        dist.all_reduce(total)
        return y + total


@scene
def a_model_that_talks(stage: Stage) -> Any:
    """It can't be run again by one process; nobody waits, and the process whose loss was bad is known."""
    training = Training(stage, {1: "loss"})
    training.inner = Talking().to(stage.device)
    training.model = DDP(training.inner)
    training.optimizer = torch.optim.SGD(training.inner.parameters(), lr=1e-2)
    return run(training)
