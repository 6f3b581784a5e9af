"""The initial weights: their size against He's scheme, what they make of the signal, and whether units are copies."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from nbdebug.chapters.training.before.calls import LEARNS, rms
from nbdebug.chapters.training.before.step import Step
from nbdebug.chapters.training.facts_before import Weight

ALIKE = 1e-6
"""Units are copies when their weights, and their gradients, differ by less than this part of their size."""


def weights(step: Step) -> tuple[Weight, ...]:
    """One line for each matrix that multiplies, in the order of the first call."""
    calls = step.calls
    names = {id(p): name for name, p in calls.parameters if name}
    seen: dict[int, Weight] = {}
    for call in calls.calls:
        if call.op not in LEARNS or call.op in ("gru", "lstm", "rnn_tanh", "rnn_relu", "bmm", "einsum"):
            continue
        own = next((t for t in call.given if id(t) in names and t.dim() > 1), None)
        if own is None or id(own) in seen or not call.given or own is call.given[0] or not own.numel():
            continue
        came = rms(call.given[0]) if call.given[0].is_floating_point() else 0.0
        seen[id(own)] = _weight(names[id(own)], own, call, came, step.gradients.get(id(own)))
    lines = list(seen.values())
    return tuple(w if i < len(lines) - 1 else _last(w) for i, w in enumerate(lines))


def _weight(name: str, own: torch.Tensor, call: Any, came: float, gradient: torch.Tensor | None) -> Weight:
    w = own.detach().float()
    across = call.op in ("matmul", "__matmul__", "mm", "addmm") or "transpose" in call.op  # units are columns there
    fan_in = w.shape[0] if across else w[0].numel()
    table = w.transpose(0, 1).flatten(1) if across else w.flatten(1)
    slope = None
    if gradient is not None:
        g = gradient.detach().to_dense().float() if gradient.is_sparse else gradient.detach().float()
        slope = g.transpose(0, 1).flatten(1) if across else g.flatten(1)
    copies = len(table) > 1 and copied(table) and slope is not None and bool(slope.any()) and copied(slope)
    return Weight(
        name,
        name.rpartition(".")[0],
        call.op,
        float(w.std(unbiased=False)),
        math.sqrt(2 / max(1, fan_in)),
        came,
        call.made or 0.0,
        None if slope is None else rms(slope),
        copies,
        bool((w == w.flatten()[0]).all()),
        True,
        own.requires_grad,
    )


def _last(weight: Weight) -> Weight:
    return dataclasses.replace(weight, hidden=False)


def copied(table: torch.Tensor) -> bool:
    """Whether all rows are the same."""
    return float((table - table[:1]).abs().max()) <= ALIKE * float(table.abs().max())
