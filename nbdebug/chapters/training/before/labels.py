"""The labels, in the order in which the loader gives them."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from nbdebug.chapters.training.facts_before import Labels, LossCall

CLASSES = 1000
"""More kinds of labels than this are no classes but numbers of things."""


def classes_of(target: torch.Tensor, loss: LossCall | None) -> torch.Tensor | None:
    """Labels as a row of whole numbers, where there is one for each sample; None for tokens, pixels and quantities."""
    if target.dim() == 2 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.dim() != 1:
        return None
    if not target.is_floating_point():
        return target if loss is not None and loss.op in ("cross_entropy", "nll_loss") else None
    binary = loss is not None and loss.op.startswith("binary") and bool(((target == 0) | (target == 1)).all())
    return target.long() if binary else None


def labels(batches: Sequence[torch.Tensor], loss: LossCall | None, loader: Any) -> Labels | None:
    """Counts and order; None where the targets are no labels of samples."""
    rows = [classes_of(t, loss) for t in batches]
    known = [row.tolist() for row in rows if row is not None]
    if not known or len(known) != len(rows):
        return None
    flat = [label for row in known for label in row]
    counts = Counter(flat)
    if not 0 < len(counts) <= CLASSES:
        return None
    total = len(flat)
    runs = 1 + sum(a != b for a, b in itertools.pairwise(flat))
    expected = 1 + (total - 1) * (1 - sum((c / total) ** 2 for c in counts.values()))
    per_batch = statistics.median(len(set(row)) for row in known)
    return Labels(
        {str(k): v for k, v in sorted(counts.items())},
        total,
        runs,
        expected,
        per_batch,
        len(known),
        complete(loader, len(known)),
        isinstance(getattr(loader, "sampler", None), SequentialSampler),
    )


def complete(loader: Any, read: int) -> bool:
    """Whether that many batches are the whole pass."""
    try:
        return read >= len(loader)
    except TypeError:  # an iterable dataset has no length
        return False
