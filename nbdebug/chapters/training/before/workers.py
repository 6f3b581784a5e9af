"""Do the loader's workers draw the same random numbers?

One and the same item is asked for again and again, in workers of a loader made like the user's. Where it comes out
different each time it is drawn at random; then the draws of one worker are laid beside those of another, and beside
those of a second pass. Nothing of it touches the user's loader: workers are processes of their own.
"""

from __future__ import annotations

import hashlib
import random
import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbdebug.chapters.training.facts_before import Workers
from nbdebug.observe.tensors import tensors_made

DRAWS = 3
"""Times that each worker is asked for the item."""
PATIENCE = 20.0
"""Seconds for one pass of the look; items that take longer are not worth it."""


class _Asked(Dataset):
    """A dataset whose every item is (worker, fingerprint of the user's item 0)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, str]:
        info: Any = torch.utils.data.get_worker_info()
        return (0 if info is None else info.id), fingerprint(self.dataset[0])


def fingerprint(item: Any) -> str:
    """A hash of an item's tensors, arrays and numbers."""
    digest = hashlib.blake2b(digest_size=12)
    for tensor in tensors_made(item):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    parts = item if isinstance(item, (tuple, list)) else item.values() if isinstance(item, dict) else [item]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            digest.update(part.tobytes() if hasattr(part, "tobytes") else repr(part).encode())
    return digest.hexdigest()


def first(rows: Any) -> Any:
    return rows[0]


def workers(loader: Any, patience: float = PATIENCE) -> tuple[Workers | None, str]:
    """(what the workers draw, "") or (None, why it could not be looked at, or ""). patience: seconds for one of the two
    passes."""
    patience = min(patience, PATIENCE)
    count = getattr(loader, "num_workers", 0)
    if not isinstance(loader, DataLoader) or not count:
        return None, ""
    if isinstance(loader.dataset, IterableDataset):
        return None, "Whether workers draw the same random numbers: the dataset is an iterable one"
    used = min(2, count)
    try:
        probe = DataLoader(
            _Asked(loader.dataset),
            batch_size=1,
            sampler=list(range(used * DRAWS)),
            num_workers=used,
            collate_fn=first,
            worker_init_fn=loader.worker_init_fn,
            timeout=patience,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
            generator=torch.Generator().manual_seed(random.SystemRandom().randrange(2**31)),
        )
        passes = [_pass(probe, patience) for _ in range(2)]
    except Exception as fault:  # the border: this look is ours, whatever the user's dataset makes of it
        return None, f"Whether workers draw the same random numbers: {type(fault).__name__}: {str(fault)[:120]}"
    draws = [list(by_worker.values()) for by_worker in passes]
    varies = all(len(set(row)) > 1 for row in draws[0])
    alike = used > 1 and len(draws[0]) > 1 and all(row == draws[0][0] for row in draws[0])
    return Workers(count, varies, varies and alike, varies and passes[0] == passes[1], _holder(loader.dataset)), ""


def _pass(probe: DataLoader, patience: float) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # Python's, about fork beside threads
        for worker, mark in probe:
            found.setdefault(worker, []).append(mark)
            if time.monotonic() - began > patience:
                raise TimeoutError(f"its items take too long ({patience:g} s)")
    return dict(sorted(found.items()))


def _holder(dataset: Any) -> str:
    """The attribute of the dataset (or of its transform) that holds a generator of random numbers."""
    todo, depth = [("", dataset)], 0
    while todo and depth < 4:
        following = []
        for path, thing in todo:
            for key, value in list(getattr(thing, "__dict__", {}).items()):
                kind = type(value)
                if isinstance(value, (random.Random, torch.Generator)) or (
                    kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")
                ):
                    return f"{path}{key}"
                if hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)):
                    following.append((f"{path}{key}.", value))
        todo, depth = following, depth + 1
    return ""
