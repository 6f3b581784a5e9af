"""The user's own loop, run once under light watch.

`Watched.run(train)` runs it and gives the raw record. Nothing that is watched changes what the loop computes: the same
weights come out, bit for bit. Our looks at fixed batches happen inside the callback, and take at most as long as half
of the loop's own time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.chapters.training.facts_run import Checkup
from nbdebug.chapters.training.run.checkup import Checkups
from nbdebug.chapters.training.run.faults import Faults
from nbdebug.chapters.training.run.flags import FlagWatch
from nbdebug.chapters.training.run.kept import Kept
from nbdebug.chapters.training.run.reading import ReadingWatch
from nbdebug.chapters.training.run.sources import unnoticed
from nbdebug.chapters.training.run.updates import UpdateWatch

PACE = 1.12
"""Checkups lie ever further apart, by this factor: some forty in a thousand steps."""
SHARE = 0.5
"""Checkups may take this share of the loop's time."""

PARTS: dict[type, str] = {
    ReadingWatch: "the order of reading the loaders",
    FlagWatch: "the mode of each module",
    UpdateWatch: "each backward and each step",
}


class Watched:
    """One run. losses, numbers: what the callback was told; read_at, backward_at: batches read and calls of backward by
    then; seconds: without our looks.

    checkups: the course on fixed batches. done: told of each step's loss, for a progress bar.
    """

    def __init__(
        self,
        model: Any,
        optimizers: list[Any],
        train_loader: Any,
        val_loader: Any,
        scheduler: Any,
        on_train: Checkups,
        on_val: Checkups,
        faults: Faults,
        done: Callable[[int, float], None] | None = None,
    ):
        self.model, self.scheduler = model, scheduler
        self.on_train, self.on_val, self.faults = on_train, on_val, faults
        self.done = faults.quietly("The progress bar", done) if done is not None else None
        self.kept = Kept()
        self.reading = ReadingWatch(
            train_loader, val_loader, faults.quietly("Which batches were read (experiments read others)", self.kept.add)
        )
        self.flags = FlagWatch(model, self.reading.evaluating, faults)
        self.updates = UpdateWatch(model, optimizers, self._stepped, lambda: self.reading.read, faults)
        self.loaders = train_loader, val_loader
        self.losses: list[float] = []
        self.numbers: list[int] = []
        self.read_at: list[int] = []
        self.backward_at: list[int] = []
        self.rate_at: list[list[float]] = []
        self.checkups: list[Checkup] = []
        self.metrics: list[float] = []
        self.schedule_calls: list[int] = []
        self.seconds = 0.0
        self.told = False
        self._ours = self._began = 0.0
        self._own_step: Any = None
        self._next = 0

    def run(self, train: Callable[[Callable[..., None]], Any]) -> None:
        """Run the user's loop. Its exceptions pass unchanged, with every hook taken away."""
        parts = self.reading, self.flags, self.updates
        began = time.perf_counter()
        try:
            for part in parts:
                self.faults.ask(f"What {PARTS[type(part)]} tells", part.attach, None)
            self._follow_schedule()
            self._checkup()
            train(self.callback)
            self._checkup(last=True)
        finally:
            for part in reversed(parts):
                part.detach()
            self._leave_schedule()
            self.seconds = time.perf_counter() - began - self._ours

    def callback(self, step: int, loss: Any, *more: Any, **named: Any) -> None:
        """What the user's loop calls after each step."""
        if not self.told:  # what was noted until then stands for the same steps
            self.told = True
            for noted in (self.numbers, self.losses, self.read_at, self.backward_at, self.rate_at):
                noted.clear()
        self._note(int(step), float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))

    def _stepped(self) -> None:
        """An optimizer has stepped. A loop that calls no callback is followed by this."""
        self.flags.stepped()
        known = self.backward_at[-1] if self.backward_at else 0
        if not self.told and self.updates.root is not None and self.updates.backwards > known:  # once for all of them
            self._note(len(self.losses), self.updates.root)

    def _note(self, step: int, loss: float) -> None:
        self.numbers.append(step)
        self.losses.append(loss)
        self.read_at.append(self.reading.read)
        self.backward_at.append(self.updates.backwards)
        self.rate_at.append(self.updates.rates[-1] if self.updates.rates else [])
        if len(self.losses) >= self._next:
            self._checkup()
        if self.done is not None:
            self.done(len(self.losses), self.losses[-1])

    def _follow_schedule(self) -> None:
        if self.scheduler is None:
            return
        own = self.scheduler.step
        self._own_step = self.scheduler.__dict__.get("step")

        def note(given: Any) -> None:
            self.schedule_calls.append(self.updates.steps)
            if isinstance(given, (int, float, torch.Tensor)):
                self.metrics.append(float(given))

        told = self.faults.quietly("When the scheduler is stepped, and what it is given", note)

        def step(*args: Any, **kwargs: Any) -> Any:
            told(kwargs.get("metrics", args[0] if args else None))
            return own(*args, **kwargs)

        self.scheduler.step = step

    def _leave_schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.__dict__.pop("step", None)
            if self._own_step is not None:
                self.scheduler.step = self._own_step

    def _checkup(self, last: bool = False) -> None:
        step = len(self.losses)
        self._next = max(step + 1, int(step * PACE))
        began = time.perf_counter()
        elapsed = began - self._began if step else 1.0
        if not step:
            self._began = began
        if step and not last and self._ours > SHARE * elapsed:
            return
        self.flags.paused = True
        try:
            none: Any = None, None
            train, val = self.faults.ask("The loss on fixed batches along the run", self._looked, none)
        finally:
            self.flags.paused = False
        self._ours += time.perf_counter() - began
        if train is not None and math.isfinite(train[0]):
            self.checkups.append(Checkup(step, train[0], val[0] if val else None, val[1] if val else 0.0))

    def _looked(self) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
        with unnoticed(*self.loaders):
            return self.on_train.mean(), self.on_val.mean()
