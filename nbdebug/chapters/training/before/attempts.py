"""Fixes that are tried before training: one batch is learnt by heart as it is, and once more with the fix.

Both times begin at the same weights, use the same optimizer and take the same steps; then everything is put back. One
batch says whether a fault holds the learning up; whether the model gets good, it does not say.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.before.learning import Ask, learn, learnt, rate_of
from nbdebug.chapters.training.before.remedies import Remedy
from nbdebug.chapters.training.facts_attempt import Attempt
from nbdebug.chapters.training.run.faults import told
from nbdebug.observe.state import Snapshot

STEPS = 100
SECONDS = 6.0
"""For one of the two times."""
BETTER = 0.7
"""The fix helps where the loss ends at this share of what it ends at without, or where the batch is learnt in this
share of the steps; as for experiments on whole runs."""
FALLS = 0.9
"""A loss above this share of the first one has not been learnt at all."""
RATE = 3e-3
"""Of Adam, where the user's own optimizers show nothing, or where there are none."""


def attempt(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    ask: Ask,
    batch: Any,
    remedy: Remedy,
    deadline: float = math.inf,
) -> Attempt:
    """Try a remedy: with the user's own optimizers, then, where these show nothing, with Adam over all trained
    parameters. Model and optimizers are as before afterwards. deadline: by the monotonic clock."""
    start = Snapshot.take(model, optimizers)
    found: Attempt | None = None
    for own in (True, False):
        if (
            (own and not optimizers)
            or (not own and remedy.own)
            or (found is not None and (found.verified or time.monotonic() > deadline))
        ):
            continue
        trying = _Trying(model, optimizers if own else None, ask, batch, start, deadline)
        later = trying.both(remedy)
        if found is None or later.verified is not None:
            found = later
    return found or Attempt(remedy.how, why="there is no optimizer to try it with")


@dataclasses.dataclass
class _Trying:
    """One optimizer: the batch learnt as it is, and with the remedy. optimizers: None for Adam."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] | None
    ask: Ask
    batch: Any
    start: Snapshot
    deadline: float

    def both(self, remedy: Remedy) -> Attempt:
        named = "Adam" if self.optimizers is None else " and ".join(type(o).__name__ for o in self.optimizers)
        rate = RATE if self.optimizers is None else rate_of(self.optimizers)
        done = Attempt(remedy.how, f"{named} at {rate:g}")
        try:
            as_is = [] if remedy.refused else self._learn(None)
        except Exception:  # a loss that refuses its targets has no course
            as_is = []
        try:
            fixed = self._learn(remedy)
        except Exception as fault:  # the fix is no fix here: said so
            return dataclasses.replace(done, as_is=tuple(as_is), why=told("tried, and it fails", fault))
        verified, why = verdict(as_is, fixed, remedy.comparable)
        return dataclasses.replace(done, as_is=tuple(as_is), fixed=tuple(fixed), verified=verified, why=why)

    def _learn(self, remedy: Remedy | None) -> list[float]:
        until = min(self.deadline, time.monotonic() + SECONDS)
        self.start.restore()
        try:
            if remedy is not None and remedy.change is not None:
                remedy.change(self.model, self.optimizers or ())
            optimizers = [_adam(self.model)] if self.optimizers is None else self.optimizers
            batch = self.batch if remedy is None or remedy.batch is None else remedy.batch
            return learn(self.model, optimizers, _answered(self.ask, remedy), batch, STEPS, until)
        finally:
            self.start.restore()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)


def _answered(ask: Ask, remedy: Remedy | None) -> Ask:
    """The same loss, in which calls are answered as the remedy wants. Raises LookupError where none of them is met."""
    if remedy is None or remedy.instead is None:
        return ask
    made = remedy.instead

    def asked(model: Any, batch: Any) -> Any:
        with made() as mode:
            loss = ask(model, batch)
        if not mode.answered:
            raise LookupError("the call to replace was not met again")
        return loss

    return asked


def verdict(as_is: Sequence[float], fixed: Sequence[float], comparable: bool = True) -> tuple[bool | None, str]:
    """(whether the fix helps, "") or (None, why that can't be said)."""
    steps, end = len(fixed) - 1, fixed[-1]
    falls = math.isfinite(end) and end < FALLS * fixed[0]
    if not as_is:
        return falls, ""  # without the fix there is no loss at all
    if not comparable:
        endless = as_is[-1] < 0 or not math.isfinite(as_is[-1]) or as_is[-1] > FALLS * as_is[0] > 0
        if learnt(fixed) and end >= 0:
            return True, ""
        return (True if falls and endless else None), "" if falls and endless else (
            f"{steps} steps on one batch show no difference"
        )
    if not math.isfinite(as_is[-1]) or end <= BETTER * as_is[-1]:
        return (True, "") if falls else (None, f"one batch is learnt neither way in {steps} steps")
    if learnt(as_is) and learnt(fixed):
        if steps <= BETTER * (len(as_is) - 1):
            return True, ""
        return None, (
            f"one batch is learnt by heart either way, in {len(as_is) - 1} steps as it is and in {steps} "
            "with the fix: whether it helps a whole run shows"
        )
    return (False, "") if falls else (None, f"one batch is learnt neither way in {steps} steps")
