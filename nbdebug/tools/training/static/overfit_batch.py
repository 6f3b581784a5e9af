"""Can one batch be learnt by heart? On a copy, with the user's own optimizers and rates, then with Adam.

A model that can learn at all learns one batch; what it takes tells where to look next. Losses may have a floor above
zero (smoothed labels, a variational bound), so that a failure is told as a number and a next step, never as a fault.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.tools.training.facts import OverfitResult
from nbdebug.tools.training.run.evaluate import loss_root
from nbdebug.tools.training.run.retrain import wants_closure
from nbdebug.tools.training.static.one_step import leaves_of

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


STEPS = 200
SECONDS = 8.0
"""For one try."""
RATES = (1e-3, 1e-2)

Tried = tuple[str, float, list[float]]
"""The optimizer, its rate, the losses."""


def heart(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ask: Ask, batch: Any, deadline: float = math.inf
) -> OverfitResult | None:
    """Tries on copies of copies; None where the model can't be copied or nothing is trained. deadline: by the
    monotonic clock; a try ends there."""
    tries: list[Tried] = []
    if optimizers:
        own = " and ".join(type(o).__name__ for o in optimizers)
        tries.append((own, rate_of(optimizers), _try(model, optimizers, None, ask, batch, deadline)))
    for rate in RATES:
        if not (tries and learnt(tries[-1][2])) and (not tries or time.monotonic() < deadline):
            tries.append(("Adam", rate, _try(model, (), rate, ask, batch, deadline)))
    if not tries or not all(math.isfinite(losses[0]) and losses[0] > 0 for _, _, losses in tries):
        return None
    told = tuple((name, rate, losses[0], losses[-1], len(losses) - 1) for name, rate, losses in tries)
    return OverfitResult(told, learnt(tries[-1][2]), *_verdict(tries, bool(optimizers)))


def _try(
    model: nn.Module, optimizers: Sequence[Any], rate: float | None, ask: Ask, batch: Any, deadline: float
) -> list[float]:
    model, optimizers = copy.deepcopy((model, list(optimizers)))
    if rate is not None:
        optimizers = [torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)]
    return learn(model, optimizers, ask, batch, STEPS, min(deadline, time.monotonic() + SECONDS))


def _verdict(tries: Sequence[Tried], own: bool) -> tuple[str, str]:
    """(what was seen, what to do next), as a person would say it."""
    name, rate, losses = tries[0]
    fell = f"{losses[0]:.3g} to {losses[-1]:.3g} in {len(losses) - 1} steps"
    if learnt(losses):
        return (
            f"One batch is learnt by heart with {name} at {rate:g}: the loss falls from {fell}",
            "Model, loss and gradients work together; look at data and schedule next.",
        )
    last = tries[-1]
    if own and learnt(last[2]):
        return (
            f"One batch is not learnt by heart with your {name} at {rate:g} (the loss goes from {fell}), and is "
            f"with Adam over all trained parameters at {last[1]:g} (to {last[2][-1]:.3g} in {len(last[2]) - 1} "
            "steps)",
            "The model can learn it: look at the learning rate, and at what the optimizer holds.",
        )
    best = min((losses[-1] for _, _, losses in tries if math.isfinite(losses[-1])), default=math.inf)
    return (
        f"One batch is not learnt by heart: the loss goes from {fell} with {name} at {rate:g}, and no lower than "
        f"{best:.3g} with Adam",
        "Either this loss has a floor (noise, smoothed labels, a bound), the model is too "
        "small for a batch, or output and loss do not fit each other: print outputs "
        "beside targets.",
    )
