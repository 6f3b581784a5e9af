"""Around the model: settings of the environment that will cause trouble, how the loss scales with the batch, and what
the loader's workers draw."""

from __future__ import annotations

import hashlib
import inspect
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbdebug.observe.tensors import output_tensors
from nbdebug.observe.variables import attributes
from nbdebug.text import count, listed
from nbdebug.tools.training.facts import WorkerDraws
from nbdebug.tools.training.run.evaluate import LossFn
from nbdebug.tools.training.static.batch_mixing import batch_size, repeatable_loss

CLOSE = 0.02
"""Relative difference below which two ways to compute a loss count as the same."""
DRAWS = 3
"""Times that each worker reads the item."""
PATIENCE = 20.0
"""Seconds for one pass of the probe; items that take longer are not worth it."""


def environment_notes(model: nn.Module, loader: Any, loss_fn: Any) -> Iterator[str]:
    """Sentences about the environment, each with what to do."""
    workers = getattr(loader, "num_workers", 0)
    if workers and "tokenizers" in sys.modules and "TOKENIZERS_PARALLELISM" not in os.environ:
        yield (
            "The loader forks workers and tokenizers is loaded: it will warn, and run without threads. Set "
            "os.environ['TOKENIZERS_PARALLELISM'] = 'false' before the import."
        )
    if getattr(loader, "pin_memory", False) and torch.backends.mps.is_available():
        yield "pin_memory=True does nothing on MPS; leave it out."
    if workers and sys.platform in ("darwin", "win32") and "ipykernel" in sys.modules:
        yield "Workers are spawned on this system: define the dataset's class in a file, not in a cell."
    try:
        source = inspect.getsource(loss_fn)
    except (OSError, TypeError):
        source = ""
    if "torch.cuda.amp." in source or "cuda.amp.autocast" in source:
        yield "torch.cuda.amp is deprecated; write torch.amp.autocast('cuda') and torch.amp.GradScaler('cuda')."
    moving = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        and m.training
        and m.track_running_stats
        and (own := list(m.parameters(recurse=False)))
        and not any(p.requires_grad for p in own)
    ]
    if moving:
        yield (
            f"{count(len(moving), 'frozen batch normalization')} ({listed(moving)}) "
            f"{'is' if len(moving) == 1 else 'are'} in train mode: the running statistics will change although the "
            "weights do not. To keep them, call .eval() on them after model.train()."
        )


def loss_reduction(model: nn.Module, loss_fn: LossFn, batch: Any) -> str:
    """Two half batches against the whole one: "mean", "sum" or "neither"; "" where it can't be told."""
    n = batch_size(batch)
    if n is None or n < 4 or n % 2:
        return ""

    def half(start: int) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t[start : start + n // 2] if t.dim() else t, batch)

    try:
        whole, first, second = (repeatable_loss(model, loss_fn, part) for part in (batch, half(0), half(n // 2)))
    except Exception:  # a batch that can't be halved: the nodes of one graph, a size that is written in
        return ""
    if abs(whole - (first + second) / 2) <= CLOSE * abs(whole):
        return "mean"
    return "sum" if abs(whole - first - second) <= CLOSE * abs(whole) else "neither"


class _WorkerItems(Dataset):
    """A dataset whose every item is (worker, fingerprint of the user's item 0)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, str]:
        info: Any = torch.utils.data.get_worker_info()
        return (0 if info is None else info.id), _fingerprint(self.dataset[0])


def _fingerprint(item: Any) -> str:
    """A hash of an item's tensors, arrays and numbers."""
    digest = hashlib.blake2b(digest_size=12)
    for tensor in output_tensors(item):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    parts = item if isinstance(item, (tuple, list)) else item.values() if isinstance(item, dict) else [item]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            digest.update(part.tobytes() if hasattr(part, "tobytes") else repr(part).encode())
    return digest.hexdigest()


def first_row(rows: Any) -> Any:
    """The collate function of the probe; spawned workers need it by name."""
    return rows[0]


def worker_draws(loader: Any, patience: float = PATIENCE) -> tuple[WorkerDraws | None, str]:
    """(what the workers draw, "") or (None, why it could not be checked, or ""). patience: seconds for one of the two
    passes."""
    patience = min(patience, PATIENCE)
    workers = getattr(loader, "num_workers", 0)
    if not isinstance(loader, DataLoader) or not workers:
        return None, ""
    if isinstance(loader.dataset, IterableDataset):
        return None, "Whether workers draw the same random numbers: the dataset is an iterable one"
    used = min(2, workers)
    try:
        probe = DataLoader(
            _WorkerItems(loader.dataset),
            batch_size=1,
            sampler=list(range(used * DRAWS)),
            num_workers=used,
            collate_fn=first_row,
            worker_init_fn=loader.worker_init_fn,
            timeout=patience,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
            generator=torch.Generator().manual_seed(random.SystemRandom().randrange(2**31)),
        )
        passes = [_draws_by_worker(probe, patience) for _ in range(2)]
    except Exception as error:  # the border: this probe is ours, whatever the user's dataset makes of it
        return None, f"Whether workers draw the same random numbers: {type(error).__name__}: {str(error)[:120]}"
    draws = list(passes[0].values())
    varies = all(len(set(row)) > 1 for row in draws)
    alike = used > 1 and len(draws) > 1 and all(row == draws[0] for row in draws)
    repeats = varies and passes[0] == passes[1]
    return WorkerDraws(workers, varies, varies and alike, repeats, _generator_of(loader.dataset)), ""


def _draws_by_worker(probe: DataLoader, patience: float) -> dict[int, list[str]]:
    draws: dict[int, list[str]] = {}
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # Python's, about fork beside threads
        for worker, fingerprint in probe:
            draws.setdefault(worker, []).append(fingerprint)
            if time.monotonic() - began > patience:
                raise TimeoutError(f"its items take too long ({patience:g} s)")
    return dict(sorted(draws.items()))


def _generator_of(dataset: Any) -> str:
    """The attribute of the dataset (or of its transform) that holds a generator of random numbers."""
    level, depth = [("", dataset)], 0
    while level and depth < 4:
        below = []
        for path, owner in level:
            for key, value in attributes(owner).items():
                kind = type(value)  # isinstance would ask the object for its class
                if issubclass(kind, (random.Random, torch.Generator)) or (
                    kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")
                ):
                    return f"{path}{key}"
                if not issubclass(kind, (torch.nn.Module, type, types.ModuleType)):
                    below.append((f"{path}{key}.", value))
        level, depth = below, depth + 1
    return ""
