"""A step runs again from what it started from, on copies of its iterators; one of which that is not known does not."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import types

import pytest
import torch
from torch import nn

from nbdebug.observe.snapshot import StepState, has_hooks


class Trainer:
    def __init__(self, batches):
        self.model, self.batches, self.losses, self.count = nn.Linear(2, 1), batches, [], 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self):
        self.count += 1
        loss = self.model(next(self.batches)).square().mean() + torch.rand(()) * self.count
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss


def data():
    torch.manual_seed(0)
    return torch.randn(6, 4, 2)


def first(pair):
    return pair[0]


def last(pair):
    return pair[-1]


ITERATORS = {
    "of a tensor": lambda: iter(data()),
    "of a list": lambda: iter(list(data())),
    "map over zip": lambda: map(first, zip(data(), range(6), strict=True)),
    "map over enumerate": lambda: map(last, enumerate(data())),
    "reversed": lambda: reversed(list(data())),
    "of a dict": lambda: iter(dict(enumerate(data())).values()),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_a_step_runs_again_bit_for_bit_and_leaves_the_users_iterator(kind):
    trainer = Trainer(ITERATORS[kind]())
    trainer.step()
    state = StepState.take(trainer.step, {"model": trainer.model}, {"optimizer": trainer.optimizer})
    assert not state.why_not
    first = [trainer.step().item() for _ in range(2)]
    end = StepState.take(trainer.step, {"model": trainer.model}, {"optimizer": trainer.optimizer})
    own, weights = trainer.batches, [p.clone() for p in trainer.model.parameters()]
    for _ in range(2):
        state.restore()
        assert (trainer.count, len(trainer.losses)) == (1, 1)
        assert [trainer.step().item() for _ in range(2)] == first
    end.leave()
    assert trainer.batches is own and trainer.count == 3 and len(trainer.losses) == 3
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), weights, strict=True))
    assert len(list(trainer.batches)) == 3


def generator():
    yield from data()


class Strange:
    def __getattr__(self, name):
        raise ValueError("no reader may call this")


UNKNOWN = {
    "a generator": lambda: generator(),
    "itertools": lambda: itertools.cycle(data()),
    "a loader": lambda: iter(torch.utils.data.DataLoader(data())),
    "a logger": lambda: logging.getLogger("x"),
    "a deque": lambda: collections.deque([1]),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(kind):
    something, model = UNKNOWN[kind](), nn.Linear(2, 1)
    state = StepState.take(lambda: (something, model), {"model": model}, {})
    assert "`something`" in state.why_not


def test_a_step_that_opens_a_file_is_refused():
    state = StepState.take(lambda: open("x"), {}, {})  # noqa: SIM115
    assert "`open`" in state.why_not


def test_none_of_the_users_code_runs():
    strange = Strange()
    state = StepState.take(lambda: strange, {}, {})
    assert not state.why_not


def test_hooks_are_seen():
    model = nn.Linear(2, 1)
    assert not has_hooks({"model": model}, {})
    handle = model.register_forward_hook(lambda *_: None)
    assert has_hooks({"model": model}, {})
    handle.remove()


def test_the_variables_of_a_namespace_are_put_back():
    names, model = types.SimpleNamespace(scale=1.0), nn.Linear(2, 1)

    def step():
        names.scale *= 2

    state = StepState.take(step, {"model": model}, {})
    step()
    state.restore()
    assert names.scale == 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float = 0.1


@torch.no_grad()
def judged(model):
    return model(torch.ones(1, 2))


def test_a_class_made_by_dataclass_and_a_decorated_function_are_the_users_own():
    trainer, settings = Trainer(iter(data())), Settings()

    def step():
        judged(trainer.model)
        return trainer.step() * settings.rate

    def writes():
        judged(trainer.model)
        torch.save(trainer.model, "model.pt")

    models, optimizers = {"model": trainer.model}, {"optimizer": trainer.optimizer}
    assert not StepState.take(step, models, optimizers).why_not
    assert "save" in StepState.take(writes, models, optimizers).why_not
    assert not StepState.take(writes, models, optimizers, writes=True).why_not
