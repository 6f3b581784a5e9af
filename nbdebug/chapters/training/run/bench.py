"""The start of the run, put back, and trained on again with one thing changed.

The bench trains by itself: the batches that the user's loop read, in their order, the user's loss function, the user's
optimizers, the learning rates that were seen. It does not call the user's loop again, which may write files or append
to lists. Before anything is concluded from it, it is asked to repeat the run as it was (`Bench.repeats`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.facts_run import Trial
from nbdebug.chapters.training.run.checkup import Checkups, loss_root, loss_value
from nbdebug.chapters.training.run.updates import norm_of
from nbdebug.observe.state import Snapshot

ALIKE = 0.02
"""The bench repeats the run where the first losses agree to this (relative); other threads and kernels move the sixth
digit, a different batch or rate the first."""
FIRST = 12
"""Losses compared for that."""


Less = Callable[[Any, Any, Any], float]


@dataclasses.dataclass(frozen=True)
class Change:
    """What is done otherwise. rate: factor on every learning rate; level: one rate all
    along, the largest that was seen, or `to`;
    zero: whether gradients
    are cleared before each backward (None: as the user's loop does); clip: largest gradient norm; decay: factor on
    weight decay; unfreeze: names of parameters; prepare: called once on the model; without: batches that are left out;
    batches: others in their place; loss_fn: another loss; training: all modules in train mode; adam: this
    rate, with a fresh Adam in place of the optimizers."""

    rate: float = 1.0
    level: bool = False
    to: float | None = None
    zero: bool | None = None
    training: bool = False
    adam: float | None = None
    clip: float | None = None
    decay: float = 1.0
    unfreeze: tuple[str, ...] = ()
    prepare: Callable[[nn.Module], None] | None = None
    without: frozenset[int] = frozenset()
    batches: Sequence[Any] | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None


@dataclasses.dataclass
class Outcome:
    """losses: step by step, up to the first that is not finite; train, val: mean losses afterwards, in eval mode."""

    losses: list[float]
    train: float
    val: float | None
    asked: list[float] = dataclasses.field(default_factory=list)


class Bench:
    """Trains from the start of the run. start: the state to begin at; rates: the learning rates of all groups at each
    step; batches: those of the run, in order. until: when the time for trials is up. evaluated: modules that the user
    keeps in eval mode while training; zero: False where the user's loop clears no gradients."""

    def __init__(self, model: nn.Module, optimizers: list[Any], loss_fn: Callable[[Any, Any], Any], batches: list[Any],
                 start: Snapshot, rates: Sequence[Sequence[float]], on_train: Checkups, on_val: Checkups):
        self.model, self.optimizers, self.loss_fn, self.batches = model, optimizers, loss_fn, batches
        self.start, self.on_train, self.on_val = start, on_train, on_val
        self.rates = [list(r) for r in rates]
        self.evaluated: frozenset[str] = frozenset()
        self.zero = True
        self._broke = False
        self.until = math.inf
        self.spent = 0.0
        self._done: dict[tuple[Change, int], Outcome] = {}

    @property
    def time_is_up(self) -> bool:
        return time.perf_counter() > self.until

    def repeats(self, losses: Sequence[float]) -> bool:
        """Whether the bench, changing nothing, gets the losses that the user's loop got."""
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        count = min(FIRST, bad)
        if count < 1 or len(losses) < 2:
            return False
        mine = self.train(Change(), count).losses
        return len(mine) == count and all(
            abs(a - b) <= ALIKE * max(abs(a), abs(b), 1e-8) for a, b in zip(mine, losses[:count]))

    def train(self, change: Change, steps: int, less: Less | None = None,
              ask: Callable[[], list[float]] | None = None) -> Outcome:
        """Train from the start with this change; the state is put back to the start before and after. less: what is
        taken off a batch's loss when it is measured afterwards; ask: asked while the weights are those of the end."""
        began = time.perf_counter()
        self.start.restore()
        try:
            with torch.enable_grad():
                losses = list(self._steps(change, steps))
            train, val = self._measured(self.on_train, less), self._measured(self.on_val, less)
            outcome = Outcome(losses, math.nan if train is None else train, val)
            outcome.asked = ask() if ask is not None else []
            if self._broke or not math.isfinite(outcome.train):
                outcome.train = math.inf
            return outcome
        finally:
            self.start.restore()
            self.spent += time.perf_counter() - began

    def _measured(self, checkups: Checkups, less: Less | None) -> float | None:
        losses = checkups.losses()
        if less is not None:
            losses = [loss - less(self.model, self.loss_fn, batch) for loss, batch in zip(losses, checkups.batches)]
        return sum(losses) / len(losses) if losses else None

    def _steps(self, change: Change, steps: int) -> Any:
        self._broke = False
        self._prepare(change)
        loss_fn = change.loss_fn or self.loss_fn
        batches = self.batches if change.batches is None else change.batches
        optimizers = self.optimizers if change.adam is None else [torch.optim.Adam(
            [p for o in self.optimizers for g in o.param_groups for p in g["params"]], change.adam)]
        for step in range(steps):
            if step % len(batches) in change.without and step < len(batches):
                continue
            if change.adam is None:
                self._set_rates(change, step)
            if self.zero if change.zero is None else change.zero:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            loss = loss_fn(self.model, batches[step % len(batches)])
            value = loss_value(loss)
            if not math.isfinite(value):
                self._broke = True
                return
            loss_root(loss).backward()
            if change.clip is not None:
                for optimizer in self.optimizers:
                    _clip(optimizer, change.clip)
            for optimizer in optimizers:
                optimizer.step()
            yield value

    def _prepare(self, change: Change) -> None:
        for name, module in self.model.named_modules():
            module.training = name not in self.evaluated or change.training
        if change.prepare is not None:
            change.prepare(self.model)
        for name in change.unfreeze:
            parameter = self.model.get_parameter(name)
            parameter.requires_grad_(True)
            if all(parameter is not p for o in self.optimizers for g in o.param_groups for p in g["params"]):
                self.optimizers[0].add_param_group({"params": [parameter]})
        if change.decay != 1.0:
            for group in (g for o in self.optimizers for g in o.param_groups):
                group["weight_decay"] = group.get("weight_decay", 0.0) * change.decay

    def _set_rates(self, change: Change, step: int) -> None:
        groups = [g for o in self.optimizers for g in o.param_groups]
        if change.level and self.rates:
            now = [max(column) for column in zip(*self.rates)]
        else:
            now = self.rates[min(step, len(self.rates) - 1)] if self.rates else [float(g["lr"]) for g in groups]
        for group, rate in zip(groups, now):
            group["lr"] = (rate if change.to is None else change.to) * change.rate

    def trial(self, what: str, change: Change, as_is: Outcome, steps: int, less: Less | None = None) -> Trial:
        """Train with the change, and set it beside what came of the run as it is."""
        return self.beside(what, self.train(change, steps, less), as_is)

    @staticmethod
    def beside(what: str, got: Outcome, as_is: Outcome) -> Trial:
        return Trial(what, tuple(as_is.losses), tuple(got.losses), as_is.train, got.train, as_is.val, got.val)


def _clip(optimizer: Any, limit: float) -> None:
    norm = norm_of(optimizer)
    if norm > limit:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(limit / norm)
