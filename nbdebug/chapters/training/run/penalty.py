"""What a loss asks of the weights beside what it asks of the output: a penalty, and how it weighs.

The model's output is held fixed and the weights are set to zero: by so much as the loss falls then, the weights were
paid for. Cut off at the output, the loss passes on the penalty's gradient alone, so that a run without it can be tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from nbdebug.chapters.training.run.checkup import loss_root, loss_value
from nbdebug.chapters.training.run.sources import unnoticed

Loss = Callable[[Any, Any], Any]


@contextlib.contextmanager
def _given(model: nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, the model's output is what `change` makes of it."""
    handle = model.register_forward_hook(lambda module, args, out: change(out))
    try:
        yield
    finally:
        handle.remove()


def penalty(model: nn.Module, loss_fn: Loss, batch: Any) -> float:
    """How much of the loss is paid for the weights; 0 where nothing is, or where it can't be told apart because the
    model is called more than once. Raises what the loss raises."""
    seen: list[Any] = []
    weights = [p for p in model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in weights]
    try:
        with unnoticed(loss_fn), torch.no_grad():
            with _given(model, seen.append):
                whole = loss_value(loss_fn(model, batch))
            if len(seen) != 1:
                return 0.0
            for p in weights:
                p.zero_()
            with _given(model, lambda out: seen[0]):
                return whole - loss_value(loss_fn(model, batch))
    finally:
        with torch.no_grad():
            for p, before in zip(weights, kept):
                p.copy_(before)


def without(loss_fn: Loss) -> Loss:
    """The same loss with the same value, whose gradient comes by way of the output only."""

    def loss(model: nn.Module, batch: Any) -> Any:
        whole = loss_root(loss_fn(model, batch))
        state = torch.get_rng_state()
        with _given(model, lambda out: tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, out)):
            paid = loss_root(loss_fn(model, batch))
        torch.set_rng_state(state)
        return whole - paid + paid.detach() if paid.requires_grad else whole

    return loss
