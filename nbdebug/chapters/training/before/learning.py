"""One batch, learnt again and again: what a model that can learn at all can do.

Dropout is off, because it stands in the way of learning by heart on purpose. The model and the optimizers that are
given are changed: the caller gives copies, or puts them back.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.before.step import leaves_of
from nbdebug.chapters.training.run.checkup import loss_root
from nbdebug.chapters.training.run.routine import wants_closure

LEARNT = 0.1
"""Share of the first loss that is left of a batch that counts as learnt by heart (TheDeepChecker: at most 5% error
after 1,000 steps)."""

Ask = Callable[[Any, Any], Any]


def learn(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ask: Ask, batch: Any, steps: int, until: float
) -> list[float]:
    """The loss before the first step and behind each: `steps` of them, fewer where it is not finite any more, where
    next to nothing is left of it, or when it is `until` by the monotonic clock."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    members = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    losses: list[float] = []
    while True:
        losses.append(loss_of(model, ask, batch, members))
        value, first = losses[-1], losses[0]
        if not math.isfinite(value) or 0 <= value <= LEARNT * first / 2 or len(losses) > steps:
            return losses
        if time.monotonic() > until:
            return losses
        for optimizer in optimizers:
            optimizer.step(
                functools.partial(_again, model, ask, batch, members)
                if wants_closure(optimizer)
                else functools.partial(float, value)
            )


def _again(*given: Any) -> Any:
    """The closure of an optimizer that asks for the loss by itself."""
    return torch.tensor(loss_of(*given))


def loss_of(model: nn.Module, ask: Ask, batch: Any, members: Sequence[torch.Tensor]) -> float:
    """The loss of the batch; its gradients go into the members alone."""
    with torch.enable_grad():
        root = loss_root(ask(model, batch))
        loss = root if root.dim() == 0 else root.float().mean()
        reached = {id(leaf) for leaf in leaves_of(loss)}
        taken = [p for p in members if id(p) in reached]
        grads = torch.autograd.grad(loss, taken, allow_unused=True) if taken else ()
    for p in members:
        p.grad = None
    for p, grad in zip(taken, grads):
        p.grad = grad.to_dense() if grad is not None and grad.is_sparse else grad  # Adam takes no sparse ones
    return float(loss.detach())


def learnt(losses: Sequence[float]) -> bool:
    return bool(losses) and math.isfinite(losses[-1]) and losses[-1] <= LEARNT * losses[0]


def rate_of(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """The largest learning rate."""
    return max((float(g.get("lr") or 0.0) for o in optimizers for g in o.param_groups), default=0.0)
