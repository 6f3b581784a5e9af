"""Which loader is being read, how often, and in which order it deals its samples out.

A `for` loop asks the loader's class for its iterator, so for the length of the run that one method is wrapped, and
passes everything through. A plain list of batches needs no watching and gets none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from nbdebug.chapters.training.facts_run import Order
from nbdebug.chapters.training.run.sources import targets_of

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


def order_of(loader: Any, batches: Sequence[Any]) -> Order:
    """How the targets of these batches, one pass or a part of it, are dealt out."""
    given = [targets_of(batch) for batch in batches]
    targets = [t.detach().cpu() for t in given if t is not None and t.dim() in (1, 2) and len(t) > 1]
    sequential = isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
    if len(targets) < 4 or len(targets) < len(batches):
        return Order(batches=len(batches), sequential=sequential)
    columns = [t.reshape(len(t), -1) for t in targets]
    if any(c.shape[1] != columns[0].shape[1] or c.shape[1] > 64 for c in columns):
        return Order(batches=len(batches), sequential=sequential)
    if targets[0].dim() == 2 and not targets[0].is_floating_point():
        columns = _words(columns)
    integers = not columns[0].is_floating_point() and columns[0].shape[1] == 1
    counts = [len(c.unique()) for c in columns] if integers else None
    everything = len(torch.cat(columns).unique()) if integers else None
    return Order(
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
