"""What the guard holds: the step that runs, and nothing of what went by, of validation, or of a graph."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import Training
from tests.nan.leftovers import assert_nothing_is_left


@pytest.fixture(autouse=True)
def no_leftovers():
    torch.manual_seed(0)
    yield
    assert_nothing_is_left()


class Loop:
    """A training that makes each batch anew and keeps weak references to it and to what the model made of it."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches: list[weakref.ref] = []
        self.outputs: list[weakref.ref] = []

    def forward(self) -> torch.Tensor:
        batch = torch.randn(5, 4)
        self.batches.append(weakref.ref(batch))
        out = self.model(batch)
        self.outputs.append(weakref.ref(out))
        return out

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = (self.forward() - torch.randn(5, 1)).square().mean()
        loss.backward()
        self.optimizer.step()

    def alive(self) -> tuple[int, int]:
        """How many batches and how many outputs still exist."""
        if any(ref() is not None for ref in self.outputs):  # no cycle should hold one; if one does, it is no leak
            gc.collect()
        return sum(ref() is not None for ref in self.batches), sum(ref() is not None for ref in self.outputs)


def test_a_step_gone_by_is_forgotten() -> None:
    loop = Loop()
    with nbdebug.guard(loop.model, loop.optimizer):
        for _ in range(10):
            loop.step()
            batches, outputs = loop.alive()
            assert batches <= 1 and outputs == 0
    assert loop.alive() == (0, 0)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "nothing"])
@pytest.mark.parametrize("train", [False, True])
def test_validation_holds_nothing(how: str, train: bool) -> None:
    """Also where the user forgot no_grad, and the graphs are never run backwards."""
    loop = Loop()
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "nothing": torch.enable_grad}[how]
    with nbdebug.guard(loop.model, loop.optimizer) as guard:
        for _ in range(3):
            loop.step()
        loop.model.train(train)
        with context():
            total = sum(loop.forward().square().mean().item() for _ in range(60))
        assert total == total
        batches, outputs = loop.alive()
        assert outputs == 0, "graphs are kept alive"
        assert batches <= (2 if how == "nothing" else 1), f"{batches} batches of 60 are held"
        loop.model.train()
        for _ in range(3):
            loop.step()
        assert loop.alive() == (loop.alive()[0], 0) and loop.alive()[0] <= 1
        assert guard.steps == 6 and not guard.trips and guard.fault == ""
    assert loop.alive() == (0, 0)


@pytest.mark.parametrize("grad", [False, True])
def test_a_validation_that_is_not_finite_is_no_trip(grad: bool) -> None:
    """The guard watches steps; what is only looked at spoils nothing."""
    loop = Loop()
    with nbdebug.guard(loop.model, loop.optimizer) as guard:
        loop.step()
        loop.model.eval()
        with torch.set_grad_enabled(grad):
            assert torch.log(loop.model(torch.randn(5, 4)) * 0).isinf().any()
        loop.model.train()
        loop.step()
    assert guard.steps == 2 and guard.report().ok and not guard.trips


def test_validation_between_a_steps_forward_and_backward_does_not_confuse_the_replay() -> None:
    training = Training("AdamW plain", bad=(2,))
    with nbdebug.guard(training.model, training.optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(4):
            training.optimizer.zero_grad()
            loss = training.loss(i)
            training.model.eval()
            with torch.no_grad():
                training.model(training.inputs[i + 5])
            training.model.train()
            loss.backward()
            training.optimizer.step()
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.samples, finding.where.step) == ("nan/log-of-nonpositive", (3,), 2)


def test_validation_in_eval_mode_with_grad_before_a_bad_step() -> None:
    training = Training("AdamW plain", bad=(2,))
    with nbdebug.guard(training.model, training.optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(4):
            training.step(i)
            training.model.eval()
            for j in range(5):
                float(training.model(training.inputs[10 + j]).detach().sum())
            training.model.train()
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.samples, finding.where.step) == ("nan/log-of-nonpositive", (3,), 2)
    assert any(args[0].data_ptr() == training.inputs[2].data_ptr() for _, args, _ in caught.value.trip.inputs)


def test_nothing_is_alive_when_training_and_guard_are_gone() -> None:
    """A closed guard keeps the model, so that a trip can be located later; nothing of torch's keeps the guard."""
    loop = Loop()
    with nbdebug.guard(loop.model, loop.optimizer) as guard:
        loop.step()
    watched = [
        weakref.ref(loop.model),
        weakref.ref(loop.model[0].weight),
        weakref.ref(loop.optimizer),
        weakref.ref(guard),
    ]
    del loop, guard
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_skipped_steps_do_not_pile_up() -> None:
    """Every step is bad, all night: what each trip holds must be let go."""
    loop = Loop()

    def step() -> None:
        loop.optimizer.zero_grad()
        (loop.forward() * float("nan")).mean().backward()
        loop.optimizer.step()

    with nbdebug.guard(loop.model, loop.optimizer, on_trip="skip") as guard:
        for _ in range(60):
            step()
        assert guard.skipped == 60
        batches, outputs = loop.alive()
        assert outputs == 0
        assert batches <= 8, f"{batches} batches of 60 skipped steps are held"
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())


def test_lines_are_bounded() -> None:
    loop = Loop()
    with nbdebug.guard(loop.model, loop.optimizer, keep=3) as guard:
        for _ in range(9):
            loop.step()
        assert [line.step for line in guard.lines] == [6, 7, 8]
