"""Can the model overfit one batch? On a copy, with the user's own optimizers and rates, then with Adam.

A model that can learn at all memorizes one batch; what it takes tells where to look next. Losses may have a floor above
zero (smoothed labels, a variational bound), so that a failure is told as a number and a next step, never as a fault.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.text import count, figures
from nbdebug.tools.training.facts import OverfitResult
from nbdebug.tools.training.run.evaluate import LossFn, loss_root
from nbdebug.tools.training.run.retrain import wants_closure
from nbdebug.tools.training.static.one_step import leaves_of

MEMORIZED = 0.1
"""Share of the first loss that is left of a batch that counts as memorized (TheDeepChecker: at most 5% error after
1,000 steps)."""
STEPS = 200
SECONDS = 8.0
"""For one try."""
RATES = (1e-3, 1e-2)
"""Of Adam."""

Try = tuple[str, float, list[float]]
"""The optimizer, its rate, the losses."""


def overfit_batch(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss_fn: LossFn, batch: Any, deadline: float
) -> OverfitResult | None:
    """Tries on copies of copies; None where the model can't be copied or nothing is trained. deadline: by the
    monotonic clock; a try ends there."""
    tries: list[Try] = []
    if optimizers:
        own = " and ".join(type(o).__name__ for o in optimizers)
        tries.append((own, largest_rate(optimizers), _try(model, optimizers, None, loss_fn, batch, deadline)))
    for rate in RATES:
        if not (tries and memorized(tries[-1][2])) and (not tries or time.monotonic() < deadline):
            tries.append(("Adam", rate, _try(model, (), rate, loss_fn, batch, deadline)))
    if not tries or not all(math.isfinite(losses[0]) and losses[0] > 0 for _, _, losses in tries):
        return None
    rows = tuple((name, rate, losses[0], losses[-1], len(losses) - 1) for name, rate, losses in tries)
    return OverfitResult(rows, memorized(tries[-1][2]), *_verdict(tries, bool(optimizers)))


def _try(
    model: nn.Module, optimizers: Sequence[Any], rate: float | None, loss_fn: LossFn, batch: Any, deadline: float
) -> list[float]:
    model, optimizers = copy.deepcopy((model, list(optimizers)))
    if rate is not None:
        optimizers = [torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)]
    return train_on(model, optimizers, loss_fn, batch, STEPS, min(deadline, time.monotonic() + SECONDS))


def _verdict(tries: Sequence[Try], own: bool) -> tuple[str, str]:
    """(the result, what to do next), in sentences."""
    name, rate, losses = tries[0]
    fell = f"from {figures(losses[0])} to {figures(losses[-1])} in {count(len(losses) - 1, 'step')}"
    if memorized(losses):
        return (
            f"The model memorizes one batch with {name} at {rate:g}: the loss falls {fell}",
            "Model, loss and gradients work together; look at data and schedule next.",
        )
    _, last_rate, last = tries[-1]
    if own and memorized(last):
        return (
            f"The model does not memorize one batch with your {name} at {rate:g} (the loss goes {fell}), but does with "
            f"Adam over all trained parameters at {last_rate:g} (down to {figures(last[-1])} in "
            f"{count(len(last) - 1, 'step')})",
            "It can learn the batch: look at the learning rate, and at the parameters in the optimizer.",
        )
    best = min((losses[-1] for _, _, losses in tries if math.isfinite(losses[-1])), default=math.inf)
    return (
        f"The model does not memorize one batch: the loss goes {fell} with {name} at {rate:g}, and no lower than "
        f"{figures(best)} with Adam",
        "Either this loss has a floor (noise, smoothed labels, a bound), the model is too small even for one batch, or "
        "output and loss do not fit each other: print outputs beside targets.",
    )


def train_on(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss_fn: LossFn, batch: Any, steps: int, until: float
) -> list[float]:
    """The loss of one batch before the first step and after each: `steps` of them, fewer where it is not finite any
    more, where next to nothing is left of it, or when it is `until` by the monotonic clock."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    members = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    losses: list[float] = []
    while True:
        losses.append(_loss_and_gradients(model, loss_fn, batch, members))
        value, first = losses[-1], losses[0]
        if not math.isfinite(value) or 0 <= value <= MEMORIZED * first / 2 or len(losses) > steps:
            return losses
        if time.monotonic() > until:
            return losses
        for optimizer in optimizers:
            optimizer.step(
                functools.partial(_closure, model, loss_fn, batch, members)
                if wants_closure(optimizer)
                else functools.partial(float, value)
            )


def _closure(model: nn.Module, loss_fn: LossFn, batch: Any, members: Sequence[torch.Tensor]) -> Any:
    """For an optimizer that computes the loss itself."""
    return torch.tensor(_loss_and_gradients(model, loss_fn, batch, members))


def _loss_and_gradients(model: nn.Module, loss_fn: LossFn, batch: Any, members: Sequence[torch.Tensor]) -> float:
    """The loss of the batch; its gradients go into the members alone."""
    with torch.enable_grad():
        root = loss_root(loss_fn(model, batch))
        loss = root if root.dim() == 0 else root.float().mean()
        reached = {id(leaf) for leaf in leaves_of(loss)}
        taken = [p for p in members if id(p) in reached]
        grads = torch.autograd.grad(loss, taken, allow_unused=True) if taken else ()
    for p in members:
        p.grad = None
    for p, grad in zip(taken, grads):
        p.grad = grad.to_dense() if grad is not None and grad.is_sparse else grad  # Adam takes no sparse ones
    return float(loss.detach())


def memorized(losses: Sequence[float]) -> bool:
    return bool(losses) and math.isfinite(losses[-1]) and losses[-1] <= MEMORIZED * losses[0]


def largest_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    return max((float(g.get("lr") or 0.0) for o in optimizers for g in o.param_groups), default=0.0)
