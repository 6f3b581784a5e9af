"""What will bite and is no fault of the model: settings of the environment, how the loss scales with the batch."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.chapters.training.before.mixing import batch_size, quiet
from nbdebug.chapters.training.run.checkup import loss_value
from nbdebug.chapters.training.run.sources import unnoticed

CLOSE = 0.02
"""Relative difference below which two ways to compute a loss count as the same."""


def notes(model: nn.Module, loader: Any, loss_fn: Any) -> Iterator[str]:
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
        yield "Workers are spawned here: the dataset's class has to stand in a file, not in a cell."
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
            f"{len(moving)} frozen batch normalisations ({', '.join(f'`{name}`' for name in moving[:3])}) are in "
            "train mode: their running statistics will move although their weights do not. Call .eval() on them "
            "after model.train() to keep them still."
        )


def accumulation(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any) -> str:
    """Two half batches against the whole one: is the loss a mean, a sum, or neither? "" where it can't be said."""
    n = batch_size(batch)
    if n is None or n < 4 or n % 2:
        return ""

    def half(start: int) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t[start : start + n // 2] if t.dim() else t, batch)

    values = []
    with quiet(model), unnoticed(ask), torch.no_grad():
        for part in (batch, half(0), half(n // 2)):
            torch.manual_seed(0)
            try:
                values.append(loss_value(ask(model, part)))
            except Exception:  # a batch that can't be halved: the nodes of one graph, a size that is written in
                return ""
    whole, first, second = values
    if abs(whole - (first + second) / 2) <= CLOSE * abs(whole):
        return "mean"
    return "sum" if abs(whole - first - second) <= CLOSE * abs(whole) else "neither"
