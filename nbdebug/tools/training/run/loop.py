"""The user's own loop, run once under light watch.

`Watched.run(train)` runs it and gives the raw record. Nothing that is watched changes what the loop computes: the same
weights come out, bit for bit. Our looks at fixed batches happen inside the callback, and take at most as long as half
of the loop's own time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, SequentialSampler

from nbdebug.observe.snapshot import random_sources as global_sources
from nbdebug.observe.tensors import tensors_in
from nbdebug.tools.training.facts import BatchEvaluation, TargetOrder
from nbdebug.tools.training.probe_errors import ProbeErrors
from nbdebug.tools.training.run.data import MOST_BYTES, targets_of, unnoticed
from nbdebug.tools.training.run.evaluate import FixedBatches
from nbdebug.tools.training.run.updates import FlagWatch, UpdateWatch

MOST = 2400
"""Batches: four for each step that an experiment has at most."""


class KeptBatches:
    """batches: the first that were read; draws: for each, what puts torch's random numbers back."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.draws: list[Callable[[], None]] = []
        self._size = 0
        self._full = False

    def add(self, batch: Any) -> None:
        """Keep it, where there is room (256 MB on the CPU; nothing is copied that lies on an accelerator)."""
        tensors = tensors_in(batch)
        self._size += sum(t.numel() * t.element_size() for t in tensors)
        self._full = (
            self._full
            or len(self.batches) >= MOST
            or self._size > MOST_BYTES
            or any(t.device.type != "cpu" for t in tensors)
        )
        if not self._full:
            self.batches.append(tree_map_only(torch.Tensor, lambda t: t.detach().clone(), batch))
            self.draws.append(_put_back())

    def used(self, indices: Sequence[int]) -> tuple[list[Any], list[Callable[[], None]]]:
        """The batches with these indices, and their draws; nothing where one of them was not kept."""
        if not all(0 <= i < len(self.batches) for i in indices):
            return [], []
        return [self.batches[i] for i in indices], [self.draws[i] for i in indices]


def _put_back() -> Callable[[], None]:
    states = [(write, read()) for name, read, write in global_sources() if not name.startswith(("Python", "NumPy"))]

    def put_back() -> None:
        for write, state in states:
            write(state)

    return put_back


KINDS = 5000
"""Words of a vocabulary up to which rows are counted word by word."""
MANY, FEW = 10, 20
"""Of so many batches the most unlike one is left out when their order is judged, and one more of each twenty."""


class ReadingWatch:
    """Follows `train` and `val` while attached. read: batches of `train` so far; passes: how often it was begun. keep:
    told of each of these batches."""

    def __init__(self, train: Any, val: Any, keep: Callable[[Any], None]):
        self.train, self.val, self.keep = train, val, keep
        self.read = self.passes = 0
        self.in_pass: int | None = None
        self._open: list[Any] = []
        self._wrapped: list[tuple[type, Any]] = []

    def attach(self) -> None:
        for kind in {type(loader) for loader in (self.train, self.val) if loader is not None}:
            own = kind.__dict__.get("__iter__")
            found = getattr(kind, "__iter__", None)
            if found is None or kind.__module__ == "builtins" or hasattr(kind, "__next__"):
                continue
            self._wrapped.append((kind, own))
            kind.__iter__ = _told(found, self)

    def detach(self) -> None:
        while self._wrapped:
            kind, own = self._wrapped.pop()
            if own is None:
                del kind.__iter__  # type: ignore[attr-defined]
            else:
                kind.__iter__ = own  # type: ignore[attr-defined]

    def evaluating(self) -> bool | None:
        """Whether validation batches are being read; None where this could not be seen."""
        if self.val is None or not any(isinstance(self.val, kind) for kind, _ in self._wrapped):
            return None
        return any(loader is self.val for loader in self._open)

    def follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, one by one; who reads them is noted."""
        self._open.append(loader)
        self.passes += loader is self.train
        count = 0
        try:
            for batch in batches:
                if loader is self.train:
                    self.read += 1
                    count += 1
                    self.keep(batch)
                yield batch
            if loader is self.train:
                self.in_pass = count
        finally:
            self._open.remove(loader)


def _told(original: Any, watch: ReadingWatch) -> Any:
    def __iter__(self: Any) -> Any:
        batches = original(self)
        watched = self is watch.train or self is watch.val
        return watch.follow(self, batches) if watched else batches

    return __iter__


def order_of(loader: Any, batches: Sequence[Any]) -> TargetOrder:
    """How the targets of these batches, one pass or a part of it, are dealt out."""
    given = [targets_of(batch) for batch in batches]
    targets = [t.detach().cpu() for t in given if t is not None and t.dim() in (1, 2) and len(t) > 1]
    sequential = isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
    if len(targets) < 4 or len(targets) < len(batches):
        return TargetOrder(batches=len(batches), sequential=sequential)
    columns = [t.reshape(len(t), -1) for t in targets]
    if any(c.shape[1] != columns[0].shape[1] or c.shape[1] > 64 for c in columns):
        return TargetOrder(batches=len(batches), sequential=sequential)
    if targets[0].dim() == 2 and not targets[0].is_floating_point():
        columns = _words(columns)
    integers = not columns[0].is_floating_point() and columns[0].shape[1] == 1
    counts = [len(c.unique()) for c in columns] if integers else None
    everything = len(torch.cat(columns).unique()) if integers else None
    return TargetOrder(
        _spread(columns, everything),
        statistics.median(counts) if counts else None,
        everything,
        len(batches),
        sequential,
    )


def _words(columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of rows of words (or other labels), how often each stands in a row; the numbers of words have no order."""
    kinds, at = torch.cat(columns).unique(return_inverse=True)
    if not 1 < len(kinds) <= KINDS or columns[0].shape[1] < 2:
        return columns
    counts = torch.zeros(len(at), len(kinds)).scatter_add_(1, at, torch.ones(at.shape))
    return list(counts.split([len(c) for c in columns]))


def _spread(columns: list[torch.Tensor], classes: int | None) -> float:
    """Variance between the batches' means over what a fair shuffle would give; for classes, of their shares."""
    if classes is not None and classes <= 1000:
        kinds = torch.cat(columns).unique()
        columns = [(c == kinds).double() for c in columns]
    whole = torch.cat(columns).double()
    expected = whole.var(0) * statistics.fmean(1 / len(c) for c in columns)
    means = torch.stack([c.double().mean(0) for c in columns])
    if len(means) >= MANY:  # some batches that are unlike all others are no order
        apart = (means - means.median(0).values).square().sum(1)
        kept = apart.argsort()[: -max(1, len(means) // FEW)].tolist()
        columns, means = [columns[i] for i in kept], means[kept]
        whole = torch.cat(columns).double()
        expected = whole.var(0) * statistics.fmean(1 / len(c) for c in columns)
    between = means.var(0)
    return float(between.sum() / expected.sum()) if float(expected.sum()) > 0 else 1.0


PACE = 1.12
"""Checkups lie ever further apart, by this factor: some forty in a thousand steps."""
SHARE = 0.5
"""Checkups may take this share of the loop's time."""

PARTS: dict[type, str] = {
    ReadingWatch: "the order of reading the loaders",
    FlagWatch: "the mode of each module",
    UpdateWatch: "each backward and each step",
}


class LoopRun:
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
        on_train: FixedBatches,
        on_val: FixedBatches,
        faults: ProbeErrors,
        done: Callable[[int, float], None] | None = None,
    ):
        self.model, self.scheduler = model, scheduler
        self.on_train, self.on_val, self.faults = on_train, on_val, faults
        self.done = faults.quietly("The progress bar", done) if done is not None else None
        self.kept = KeptBatches()
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
        self.checkups: list[BatchEvaluation] = []
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
            self.checkups.append(BatchEvaluation(step, train[0], val[0] if val else None, val[1] if val else 0.0))

    def _looked(self) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
        with unnoticed(*self.loaders):
            return self.on_train.mean(), self.on_val.mean()
