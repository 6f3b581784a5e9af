"""The order of the samples: is it fair, and what becomes of the run when it is?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

UNFAIR = 3.0
"""Variance between batch means over a fair shuffle's. Over four batches and more, a fair one stays below 2.6 in 99 of
100 (chi-square with three degrees of freedom, divided by three: 3.8 at its 99th percentile for one column, less for
several)."""


def shuffled(batches: Sequence[Any]) -> list[Any] | None:
    """The samples of these batches, dealt out afresh. None where batches can't be taken apart into samples; raises
    RuntimeError or TypeError where samples of different batches do not fit together."""
    generator = torch.Generator().manual_seed(0)
    sizes = [_length(batch) for batch in batches]
    if None in sizes or len(batches) < 2:
        return None
    whole = _joined(list(batches))
    order = torch.randperm(sum(s or 0 for s in sizes), generator=generator)
    return [rows_of(whole, part) for part in order.split(sizes[0] or 1)]


def _length(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    members = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(members, (list, tuple)) or not members:
        return None
    sizes = {_length(member) for member in members}
    return sizes.pop() if len(sizes) == 1 else None


def _joined(batches: list[Any]) -> Any:
    one = batches[0]
    if isinstance(one, torch.Tensor):
        return torch.cat(batches)
    if isinstance(one, dict):
        return {key: _joined([b[key] for b in batches]) for key in one}
    return [_joined(list(members)) for members in zip(*batches)]


def rows_of(whole: Any, rows: torch.Tensor) -> Any:
    if isinstance(whole, torch.Tensor):
        return whole[rows.to(whole.device)]
    if isinstance(whole, dict):
        return {key: rows_of(value, rows) for key, value in whole.items()}
    return [rows_of(member, rows) for member in whole]
