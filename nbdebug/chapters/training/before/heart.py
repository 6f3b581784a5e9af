"""Can one batch be learnt by heart? On a copy, with the user's own optimizer and rate, then with Adam.

A model that can learn at all learns one batch; what it takes tells where to look next. Dropout is off, because it
stands in the way of learning by heart on purpose. Losses may have a floor above zero (smoothed labels, a variational
bound), so that a failure is told as a number and a next step, never as a fault.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.before.step import leaves_of
from nbdebug.chapters.training.facts_before import Heart
from nbdebug.chapters.training.run.checkup import loss_root

STEPS = 200
LEARNT = 0.1
"""Share of the first loss that is left of a batch that counts as learnt by heart (TheDeepChecker: at most 5% error
after 1,000 steps)."""
SECONDS = 8.0
"""For one try."""
RATES = (1e-3, 1e-2)


def heart(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ask: Callable[[Any, Any], Any], batch: Any,
          tick: Callable[[], None]) -> Heart | None:
    """Tries on copies of copies; None where the model can't be copied or nothing is trained."""
    tries: list[tuple[str, float, float, float, int]] = []
    alone = len(optimizers) == 1 and not isinstance(optimizers[0], torch.optim.LBFGS)  # LBFGS asks for the loss again
    if alone:
        own = type(optimizers[0]).__name__
        rate = max((float(g.get("lr") or 0.0) for g in optimizers[0].param_groups), default=0.0)
        tries.append(_try(model, optimizers[0], own, rate, ask, batch, tick))
    for rate in RATES:
        if not (tries and _learnt(tries[-1])):
            tries.append(_try(model, None, "Adam", rate, ask, batch, tick))
    if not tries or not all(math.isfinite(first) and first > 0 for _, _, first, _, _ in tries):
        return None
    return Heart(tuple(tries), _learnt(tries[-1]), *_verdict(tries, alone))


def _learnt(done: tuple[str, float, float, float, int]) -> bool:
    return math.isfinite(done[3]) and done[3] <= LEARNT * done[2]


def _try(model: nn.Module, optimizer: Any, name: str, rate: float, ask: Callable[[Any, Any], Any], batch: Any,
         tick: Callable[[], None]) -> tuple[str, float, float, float, int]:
    model, optimizer = copy.deepcopy((model, optimizer))
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    if optimizer is None:
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    until = time.monotonic() + SECONDS
    members = [p for g in optimizer.param_groups for p in g["params"]]
    first, last, step = math.nan, math.nan, 0
    for step in range(1, STEPS + 2):
        last = _loss(model, ask, batch, members)
        first = last if step == 1 else first
        if not math.isfinite(last) or last <= LEARNT * first * 0.5 or step > STEPS or time.monotonic() > until:
            break
        optimizer.step(lambda value=last: torch.tensor(value))
        tick()
    return name, rate, first, last, step - 1


def _loss(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any, members: list[torch.Tensor]) -> float:
    """The loss of the batch; its gradients go into the members of this try alone."""
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


def _verdict(tries: list[tuple[str, float, float, float, int]], own: bool) -> tuple[str, str]:
    """(what was seen, what to do next), as a person would say it."""
    name, rate, first, last, steps = tries[0]
    fell = f"{first:.3g} to {last:.3g} in {steps} steps"
    if _learnt(tries[0]):
        return (f"One batch is learnt by heart with {name} at {rate:g}: the loss falls from {fell}",
                "Model, loss and gradients work together; look at data and schedule next.")
    best = min(tries, key=lambda t: t[3] if math.isfinite(t[3]) else math.inf)
    if own and _learnt(tries[-1]):
        return (f"One batch is not learnt by heart with your {name} at {rate:g} (the loss goes from {fell}), and is "
                "with "
                f"Adam over all trained parameters at {tries[-1][1]:g} (to {tries[-1][3]:.3g} in {tries[-1][4]} steps)",
                "The model can learn it: look at the learning rate, and at what the optimizer holds.")
    return (f"One batch is not learnt by heart: the loss goes from {fell} with {name} at {rate:g}, and no lower than "
            f"{best[3]:.3g} with Adam", "Either this loss has a floor (noise, smoothed labels, a bound), the model "
                                        "is too small for a batch, or output and loss do not fit each other: print "
                                        "outputs beside targets.")
