"""Which items of a data set the rows of a batch are.

`BatchHook` (step_hooks.py) tells an `ItemLog` of each list of indices that a loader's sampler gives, and of each batch
that the loader gives: in the same order, also where worker processes read ahead. Of a batch a fingerprint is kept: the
shapes of its tensors, and some values of each. A model's inputs are recognized by that, on another device or in another
dtype, too; a batch that the loop has changed is known only where the user's own code has asked the loader for it.

A row is an item where the collate function keeps the order. torch's own does; another one is tried on items of the
batch, forwards and backwards.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from nbdebug.observe.locations import locate
from nbdebug.observe.snapshot import same_random_numbers
from nbdebug.observe.tensors import tensors_in
from nbdebug.observe.variables import attributes
from nbdebug.report import Item

MOST_BATCHES = 64
"""Batches that are remembered: a trainer reads those of an accumulated step, and some more, ahead."""
VALUES, TENSORS = 16, 4
"""Of so many tensors of a batch so many values are remembered."""
MOST_TRIED = 6
"""Items on which a collate function is tried."""
NAME_KEYS = ("path", "file", "filename", "file_name", "image_path", "id", "name", "uid", "key")
"""Keys of a batch, or attributes of a data set, that name its items."""

Fingerprint = list[tuple[tuple[int, ...], torch.Tensor]]


def fingerprint(tree: Any) -> Fingerprint:
    """Shape and some values of each tensor, which stay on their device."""
    with _disable_current_modes(), torch.no_grad():
        tensors = [t.detach() for t in tensors_in(tree) if t.layout is torch.strided and t.device.type != "meta"]
        return [(tuple(t.shape), _some(t)) for t in tensors[:TENSORS] if t.numel()]


def _some(t: torch.Tensor) -> torch.Tensor:
    """Values at places that depend on the shape alone."""
    apart = max(1, t.numel() // VALUES)
    if t.is_contiguous():
        return t.view(-1)[::apart][:VALUES].clone()
    some = torch.arange(0, t.numel(), apart, device=t.device)[:VALUES]
    return t[torch.unravel_index(some, t.shape)]  # no copy of all of it


def _alike(one: Fingerprint, other: Fingerprint) -> int:
    """How many tensors of one are in the other."""
    return sum(any(shape == s and _equal(values, v) for s, v in other) for shape, values in one)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    with _disable_current_modes(), torch.no_grad():
        return torch.allclose(one.cpu().to(other.dtype), other.cpu(), rtol=0, atol=0, equal_nan=True)


@dataclasses.dataclass
class LoadedBatch:
    """A batch that a loader gave. indices: of its rows; dataset, collate: of the loader; values: its fingerprint;
    names: what the batch itself says of its rows; direct: the user's own code has asked for it."""

    indices: Sequence[int]
    dataset: Any
    collate: Any
    values: Fingerprint
    names: Sequence[str]
    direct: bool


class ItemLog:
    """The last batches that loaders gave."""

    def __init__(self) -> None:
        self.batches: collections.deque[LoadedBatch] = collections.deque(maxlen=MOST_BATCHES)
        self._asked: weakref.WeakKeyDictionary[Any, collections.deque | None] = weakref.WeakKeyDictionary()
        self._read: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def index(self, iterator: Any, index: Any) -> None:
        """A loader's sampler has given indices. Of an iterator that was begun before, with workers, nothing is
        known."""
        if iterator not in self._asked:
            begun = getattr(iterator, "_send_idx", 0) > 0
            self._asked[iterator] = None if begun or not getattr(iterator, "_in_order", True) else collections.deque()
        queue = self._asked[iterator]
        if queue is not None:
            queue.append(index)

    def batch(self, iterator: Any, batch: Any) -> None:
        """A loader has given a batch."""
        queue = self._asked.get(iterator)
        index = queue.popleft() if queue else None
        values = fingerprint(batch)
        rows = next((shape[0] for shape, _ in values if shape), 0)
        if isinstance(iterator._dataset, IterableDataset):
            start = self._read.get(iterator, 0)
            self._read[iterator] = start + rows
            index = range(start, start + rows) if iterator._num_workers == 0 else None
        if not isinstance(index, (list, tuple, range)) or not all(type(i) is int for i in index):
            return
        entry = LoadedBatch(index, iterator._dataset, iterator._collate_fn, values, _names(batch, rows), _is_direct())
        self.batches.append(entry)

    def items(
        self, inputs: Fingerprint, rows: Iterable[int], batch_size: int | None, latest: bool
    ) -> tuple[Item, ...] | None:
        """The items that these rows of a model's inputs are; None where that is not known. latest: inputs that are like
        no batch may be of the one that was read last."""
        rows = list(rows)
        if not self.batches:
            return None
        batch = max(reversed(self.batches), key=lambda b: _alike(inputs, b.values))  # of equals the newest
        if not _alike(inputs, batch.values):
            batch = self.batches[-1]
            if not (latest and batch.direct):
                return None
        if len(batch.indices) != batch_size or max(rows, default=0) >= len(batch.indices) or not _keeps_order(batch):
            return None
        return tuple(
            Item(batch.indices[row], batch.names[row] if batch.names else _name(batch.dataset, batch.indices[row]))
            for row in rows
        )


def _is_direct() -> bool:
    """Whether the user's own code has asked a loader for its next batch, and no library's."""
    stack = locate()
    return stack.user is not None and stack.library is None


def _names(batch: Any, rows: int) -> Sequence[str]:
    """What the batch itself says of its rows: under a key such as "path" or "id"."""
    if not isinstance(batch, dict):
        return ()
    for key in NAME_KEYS:
        value = batch.get(key)
        if isinstance(value, (list, tuple)) and len(value) == rows and all(isinstance(v, (str, int)) for v in value):
            return [str(v) for v in value]
    return ()


def _name(dataset: Any, index: int) -> str:
    """The path or id of an item, where the data set has a list of them: of files, or of pairs that begin with one."""
    if isinstance(dataset, Subset):
        inside = int(dataset.indices[index])
        return _name(dataset.dataset, inside) or f"item {inside} of the whole set"
    own = attributes(dataset)
    for values in sorted(own.values(), key=lambda v: not isinstance(v, list)):
        whole = type(values) in (list, tuple) and len(values) == _length(dataset)
        if whole and 0 <= index < len(values) and (text := _text(values[index])):
            return text
    return ""


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if isinstance(value, dict):
        value = next((value[key] for key in NAME_KEYS if key in value), "")
    return str(value) if isinstance(value, (str, os.PathLike)) and 0 < len(str(value)) < 300 else ""


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # the user's own, or none
        return None


def _keeps_order(batch: LoadedBatch) -> bool:
    """Whether the rows of the batch are in the order of its indices. A collate function of the user's is called with
    some of the items, and with the same in reverse: what it gives must be reversed, too."""
    if batch.collate is default_collate or isinstance(batch.dataset, IterableDataset):
        return True
    try:
        with same_random_numbers(), _disable_current_modes(), torch.no_grad():
            items = [batch.dataset[index] for index in batch.indices[:MOST_TRIED]]
            there, back = (tensors_in(batch.collate(part)) for part in (list(items), items[::-1]))
            rows = [(a, b) for a, b in zip(there, back, strict=True) if a.dim() and len(a) == len(items)]
            return bool(rows) and all(_equal(a.flip(0), b) for a, b in rows if a.shape == b.shape)
    except Exception:  # the user's own code, called at another time: nothing is known then
        return False


def loader_like(loader: Any, **options: Any) -> Any:
    """A further DataLoader over the same set."""
    batched = {} if "batch_sampler" in options else {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    names = ("worker_init_fn", "multiprocessing_context") if options.get("num_workers") else ()
    worker = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, collate_fn=loader.collate_fn, **batched, **worker, **options)
