"""The user's own loop, run once under light watch.

`LoopRun.run(train)` runs it and keeps the raw record. Nothing that is watched changes what the loop computes: the same
weights come out, bit for bit. Evaluations on fixed batches happen inside the callback, and take at most half as long as
the loop itself.
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

from nbdebug.observe.snapshot import random_sources
from nbdebug.observe.step_hooks import StepHook
from nbdebug.observe.tensors import tensors_in
from nbdebug.tools.training.facts import BatchEvaluation, TargetOrder
from nbdebug.tools.training.probe_errors import ProbeErrors
from nbdebug.tools.training.run.data import MOST_BYTES, preserve_rng, targets_of
from nbdebug.tools.training.run.evaluate import FixedBatches
from nbdebug.tools.training.run.updates import ModeWatch, UpdateWatch

MOST = 2400
"""Batches: four for each step that an experiment has at most."""
PACE = 1.12
"""Evaluations are ever further apart, by this factor: some forty in a thousand steps."""
SHARE = 0.5
"""Evaluations may take this share of the loop's time."""
WORDS = 5000
"""Words of a vocabulary up to which rows are counted word by word."""
MANY, FEW = 10, 20
"""Of so many batches the most unlike one is left out when their order is judged, and one more of each twenty."""


class LoopRun:
    """One run. losses, step_numbers: from the callback; read_at, backward_at: batches read and calls of backward by
    then; rate_at: every group's learning rate; seconds: without our evaluations; end: the last loss on fixed batches,
    finite or not (NaN also where it is not known).

    evaluations: the course on fixed batches. on_step: called with each step's loss, for a progress bar; taken: with
    each optimizer that is first seen when it steps, where there were none before.
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
        errors: ProbeErrors,
        on_step: Callable[[int, float], None] | None = None,
        taken: Callable[[Any], None] | None = None,
    ):
        self.model, self.scheduler = model, scheduler
        self.on_train, self.on_val, self.errors = on_train, on_val, errors
        self.on_step = errors.wrap("The progress bar", on_step) if on_step is not None else None
        self.saved = SavedBatches()
        save = errors.wrap("Which batches were read (experiments read others)", self.saved.add)
        self.reading = LoaderWatch(train_loader, val_loader, save)
        self.modes = ModeWatch(model, self.reading.evaluating, errors)
        self.updates = UpdateWatch(model, optimizers, self._stepped, lambda: self.reading.read, errors, taken)
        self.loaders = train_loader, val_loader
        self.losses: list[float] = []
        self.step_numbers: list[int] = []
        self.read_at: list[int] = []
        self.backward_at: list[int] = []
        self.rate_at: list[list[float]] = []
        self.evaluations: list[BatchEvaluation] = []
        self.metrics: list[float] = []
        self.schedule_calls: list[int] = []
        self.seconds = 0.0
        self.has_callback = False
        self.end = math.nan
        self._ours = self._began = 0.0
        self._scheduler_step: Any = None
        self._next = 0
        self._stepping: set[int] = set()

    @property
    def adversaries(self) -> bool:
        """Whether several optimizers have stepped, each after a backward of its own, as those of a GAN do."""
        return len(self._stepping) > 1 and self.updates.backwards > 1.5 * len(self.losses)

    def run(self, train: Callable[[Callable[..., None]], Any]) -> None:
        """Run the user's loop. Its exceptions pass unchanged, with every hook taken away."""
        parts: dict[str, Any] = {
            "the order of reading the loaders": self.reading,
            "the mode of each module": self.modes,
            "each backward and each step": self.updates,
        }
        began = time.perf_counter()
        steps = StepHook(lambda optimizer, *_: self._stepping.add(id(optimizer)))
        try:
            for topic, part in parts.items():
                self.errors.run(f"What {topic} shows", part.attach, None)
            self._watch_scheduler()
            self._evaluate()
            train(self.callback)
            self._evaluate(last=True)
        finally:
            steps.remove()
            for part in reversed(parts.values()):
                part.detach()
            self._unwatch_scheduler()
            self.seconds = time.perf_counter() - began - self._ours

    def callback(self, step: int, loss: Any, *more: Any, **named: Any) -> None:
        """What the user's loop calls after each step."""
        if not self.has_callback:  # the notes until then are of the same steps
            self.has_callback = True
            for notes in (self.step_numbers, self.losses, self.read_at, self.backward_at, self.rate_at):
                notes.clear()
        self._note(int(step), float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))

    def _stepped(self) -> None:
        """An optimizer has stepped. A loop that calls no callback is followed by this."""
        self.modes.stepped()
        known = self.backward_at[-1] if self.backward_at else 0
        # once for all optimizers
        if not self.has_callback and self.updates.root is not None and self.updates.backwards > known:
            self._note(len(self.losses), self.updates.root)

    def _note(self, step: int, loss: float) -> None:
        self.step_numbers.append(step)
        self.losses.append(loss)
        self.read_at.append(self.reading.read)
        self.backward_at.append(self.updates.backwards)
        self.rate_at.append(self.updates.rates[-1] if self.updates.rates else [])
        if len(self.losses) >= self._next:
            self._evaluate()
        if self.on_step is not None:
            self.on_step(len(self.losses), self.losses[-1])

    def _watch_scheduler(self) -> None:
        if self.scheduler is None:
            return
        own = self.scheduler.step
        self._scheduler_step = self.scheduler.__dict__.get("step")

        def note(metric: Any) -> None:
            self.schedule_calls.append(self.updates.steps)
            if isinstance(metric, (int, float, torch.Tensor)):
                self.metrics.append(float(metric))

        guarded = self.errors.wrap("When the scheduler is stepped, and with which value", note)

        def step(*args: Any, **kwargs: Any) -> Any:
            guarded(kwargs.get("metrics", args[0] if args else None))
            return own(*args, **kwargs)

        self.scheduler.step = step

    def _unwatch_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.__dict__.pop("step", None)
            if self._scheduler_step is not None:
                self.scheduler.step = self._scheduler_step

    def _evaluate(self, last: bool = False) -> None:
        step = len(self.losses)
        self._next = max(step + 1, int(step * PACE))
        began = time.perf_counter()
        elapsed = began - self._began if step else 1.0
        if not step:
            self._began = began
        if step and not last and self._ours > SHARE * elapsed:
            return
        self.modes.paused = True
        try:
            neither: Any = None, None
            train, val = self.errors.run("The loss on fixed batches along the run", self._means, neither)
        finally:
            self.modes.paused = False
        self._ours += time.perf_counter() - began
        self.end = math.nan if train is None else train[0]
        if train is not None and math.isfinite(train[0]):
            self.evaluations.append(BatchEvaluation(step, train[0], val[0] if val else None, val[1] if val else 0.0))

    def _means(self) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
        with preserve_rng(*self.loaders):
            return self.on_train.mean(), self.on_val.mean()


class SavedBatches:
    """batches: the first that were read; draws: for each, what puts torch's random numbers back."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.draws: list[Callable[[], None]] = []
        self._size = 0
        self._full = False

    def add(self, batch: Any) -> None:
        """Save it, where there is room (256 MiB on the CPU; no copies are made on an accelerator)."""
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
            self.draws.append(_save_torch_rng())

    def at(self, indices: Sequence[int]) -> tuple[list[Any], list[Callable[[], None]]]:
        """The batches with these indices, and their draws; none where one of them was not saved."""
        if not all(0 <= i < len(self.batches) for i in indices):
            return [], []
        return [self.batches[i] for i in indices], [self.draws[i] for i in indices]


def _save_torch_rng() -> Callable[[], None]:
    states = [(write, read()) for name, read, write in random_sources() if not name.startswith(("Python", "NumPy"))]

    def restore() -> None:
        for write, state in states:
            write(state)

    return restore


class LoaderWatch:
    """Watches `train` and `val` being read. read: batches of `train` so far; passes: how often it was begun; per_pass:
    batches of its last whole pass; stopped_at: batches of the last pass, where it ended early; last: the newest batch.
    save: called with each of these batches."""

    def __init__(self, train: Any, val: Any, save: Callable[[Any], None]):
        self.train, self.val, self.save = train, val, save
        self.read = self.passes = 0
        self.stopped_at: int | None = None
        self.last: Any = None
        self.per_pass: int | None = None
        self._open: list[Any] = []
        self._patched: list[tuple[type, Any]] = []

    def attach(self) -> None:
        for kind in {type(loader) for loader in (self.train, self.val) if loader is not None}:
            own = kind.__dict__.get("__iter__")
            method = getattr(kind, "__iter__", None)
            if method is None or kind.__module__ == "builtins" or hasattr(kind, "__next__"):
                continue
            self._patched.append((kind, own))
            kind.__iter__ = _watched_iter(method, self)

    def detach(self) -> None:
        while self._patched:
            kind, own = self._patched.pop()
            if own is None:
                del kind.__iter__  # type: ignore[attr-defined]
            else:
                kind.__iter__ = own  # type: ignore[attr-defined]

    def evaluating(self) -> bool | None:
        """Whether validation batches are being read; None where this is not known."""
        if self.val is None or not any(isinstance(self.val, kind) for kind, _ in self._patched):
            return None
        return any(_is_loader(loader, self.val) for loader in self._open)

    def follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, one by one, with a note of each."""
        self._open.append(loader)
        of_train = _is_loader(loader, self.train)
        self.passes += of_train
        count = 0
        try:
            for batch in batches:
                if of_train:
                    self.read += 1
                    count += 1
                    self.last, self.stopped_at = batch, count
                    self.save(batch)
                yield batch
            if of_train:
                self.per_pass, self.stopped_at = count, None
        finally:
            self._open.remove(loader)


def _watched_iter(original: Any, watch: LoaderWatch) -> Any:
    def __iter__(self: Any) -> Any:
        batches = original(self)
        watched = _is_loader(self, watch.train) or _is_loader(self, watch.val)
        return watch.follow(self, batches) if watched else batches

    return __iter__


def _is_loader(loader: Any, known: Any) -> bool:
    """Whether this is the loader that is known, or another one over the same data set, as a trainer makes for
    itself."""
    if loader is known or known is None:
        return loader is known
    return isinstance(loader, DataLoader) and loader.dataset is getattr(known, "dataset", None)


def target_order(loader: Any, batches: Sequence[Any]) -> TargetOrder:
    """The order of the targets of these batches, one pass or a part of it."""
    known = [targets_of(batch) for batch in batches]
    targets = [t.detach().cpu() for t in known if t is not None and t.dim() in (1, 2) and len(t) > 1]
    sequential = isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
    unknown = TargetOrder(batches=len(batches), sequential=sequential)
    if len(targets) < 4 or len(targets) < len(batches):
        return unknown
    columns = [t.reshape(len(t), -1) for t in targets]
    if any(c.shape[1] != columns[0].shape[1] or c.shape[1] > 64 for c in columns):
        return unknown
    if targets[0].dim() == 2 and not targets[0].is_floating_point():
        columns = _word_counts(columns)
    labels = not columns[0].is_floating_point() and columns[0].shape[1] == 1
    classes = len(torch.cat(columns).unique()) if labels else None
    per_batch = statistics.median(len(c.unique()) for c in columns) if labels else None
    return TargetOrder(_spread(columns, classes), per_batch, classes, len(batches), sequential)


def _word_counts(columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of rows of words (or other labels), how often each is in a row; the numbers of words have no order."""
    kinds, at = torch.cat(columns).unique(return_inverse=True)
    if not 1 < len(kinds) <= WORDS or columns[0].shape[1] < 2:
        return columns
    counts = torch.zeros(len(at), len(kinds)).scatter_add_(1, at, torch.ones(at.shape))
    return list(counts.split([len(c) for c in columns]))


def _spread(columns: list[torch.Tensor], classes: int | None) -> float:
    """Variance between the batches' means over what a fair shuffle would give; for classes, of their shares."""
    if classes is not None and classes <= 1000:
        kinds = torch.cat(columns).unique()
        columns = [(c == kinds).double() for c in columns]
    means = torch.stack([c.double().mean(0) for c in columns])
    if len(means) >= MANY:  # some batches that are unlike all others are no order
        apart = (means - means.median(0).values).square().sum(1)
        usual = apart.argsort()[: -max(1, len(means) // FEW)].tolist()
        columns, means = [columns[i] for i in usual], means[usual]
    expected = torch.cat(columns).double().var(0) * statistics.fmean(1 / len(c) for c in columns)
    between = means.var(0)
    return float(between.sum() / expected.sum()) if float(expected.sum()) > 0 else 1.0
