"""Watchers that begin and end inside of a step, from each place where a user's code or a click may do so: the step goes
on as without them, and nothing of them stays."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import nbdebug
from nbdebug.observe.step_hooks import StepHook, StepSummary
from tests.nan.leftovers import assert_nothing_is_left, hooks_of


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def traced(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return StepSummary({"model": model}, lambda *_: None)


WATCHERS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "guard": nbdebug.guard,
    "grad_watch": nbdebug.grad_watch,
    "trace": traced,
    "stop_at": lambda model, optimizer: nbdebug.stop_at(model, "0", when=lambda **_: False),
}
ENDS: dict[str, Callable[[Any], Any]] = {
    "guard": lambda watch: watch.close(),
    "grad_watch": lambda watch: watch.close(),
    "trace": lambda watch: watch.close(),
    "stop_at": lambda watch: watch.clear(),
}
PLACES = {
    "before": lambda model, optimizer, call: optimizer.register_step_pre_hook(call),
    "after": lambda model, optimizer, call: optimizer.register_step_post_hook(call),
    "before all": lambda model, optimizer, call: torch_optimizer.register_optimizer_step_pre_hook(call),
    "after all": lambda model, optimizer, call: torch_optimizer.register_optimizer_step_post_hook(call),
    "forward": lambda model, optimizer, call: model[2].register_forward_hook(call),
    "backward": lambda model, optimizer, call: model[4].weight.register_hook(lambda gradient: call()),
}


@contextlib.contextmanager
def calling(where: str, model: nn.Module, optimizer: torch.optim.Optimizer, action: Callable[[], None]):
    """Within a step, call this at a place of the user's own, once; there are hooks of the user's own behind it."""
    calls = [action]

    def call(*_: Any) -> None:
        if calls:
            calls.pop()()

    with contextlib.ExitStack() as stack:
        for function in (call, lambda *_: None):
            handle = PLACES[where](model, optimizer, function)
            stack.callback(handle.remove)
        yield
    assert not calls


@pytest.mark.parametrize(("begin", "end"), list(itertools.product(PLACES, PLACES)))
def test_every_pair_begins_and_ends_inside_of_a_step(begin: str, end: str) -> None:
    for pair in itertools.combinations(WATCHERS, 2):
        begins_and_ends(pair, begin, end)


def begins_and_ends(pair: tuple[str, str], begin: str, end: str) -> None:
    bare, watched = training(), training()
    random = torch.get_rng_state()
    for _ in range(4):
        step(*bare)
    torch.set_rng_state(random)
    watches: list[Any] = []
    with calling(begin, *watched, lambda: watches.extend(WATCHERS[name](*watched) for name in pair)):
        step(*watched)
    step(*watched)
    with calling(end, *watched, lambda: [ENDS[name](watch) for name, watch in zip(pair, watches)]):
        step(*watched)
    step(*watched)
    assert all(torch.equal(a, b) for a, b in zip(bare[0].state_dict().values(), watched[0].state_dict().values()))
    assert hooks_of(watched[0]) == 0, pair
    assert not watched[1]._optimizer_step_pre_hooks and not watched[1]._optimizer_step_post_hooks, pair
    assert_nothing_is_left()
    assert not [w.fault for w in watches if getattr(w, "fault", "")]
    step(*watched)


def test_hooks_that_come_and_go_inside_of_hooks() -> None:
    model, optimizer = training()
    calls: list[str] = []
    outer: list[StepHook] = []

    def first(*_: Any) -> None:
        calls.append("first")
        outer.pop().remove()
        outer.append(StepHook(lambda *_: calls.append("late"), optimizer))

    outer.append(StepHook(first, optimizer))
    second = StepHook(lambda *_: calls.append("second"), optimizer)
    own = optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
    step(model, optimizer)
    step(model, optimizer)
    assert calls == ["first", "second", "own", "second", "late", "own"]
    for hook in (second, *outer, *outer):
        hook.remove()
    assert list(optimizer._optimizer_step_pre_hooks) == [own.id]
