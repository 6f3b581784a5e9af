"""How does the gradient grow or fade on its way back?

One forward and backward on one batch. Each call of a layer tells the norm of the gradient at its output, so that a
module that is called at every moment of a sequence shows the way through time, and a stack of layers the way through
depth. Ratios of these norms do not depend on the scale of the loss or of the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.facts_run import Point
from nbdebug.chapters.training.run.checkup import loss_root
from nbdebug.chapters.training.run.sources import unnoticed
from nbdebug.observe.tensors import read, tensors_made

MOST = 2000
"""Calls that are followed."""


def flow(model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any) -> tuple[Point, ...]:
    """The calls of layers with weights, in order; () where the loss has no gradient. The gradients of parameters are
    left as they are."""
    calls: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []
    handles = []
    for name, module in model.named_modules():
        if any(p.dim() > 1 for p in module._parameters.values() if p is not None):
            handles.append(module.register_forward_hook(
                lambda module, args, out, name=name: _follow(calls, name, out)))
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with unnoticed(loss_fn), torch.enable_grad():
            root = loss_root(loss_fn(model, batch))
            torch.autograd.grad(root, trained, allow_unused=True)
    except Exception:  # the border: what has no gradient is told by others
        return ()
    finally:
        for handle in handles:
            handle.remove()
    with_gradient = [(name, size, grads[0]) for name, size, grads in calls if grads]
    sizes = read([size.float() for _, size, _ in with_gradient])
    norms = read([norm.float() for _, _, norm in with_gradient])
    return tuple(Point(name, size, norm) for (name, _, _), size, norm in zip(with_gradient, sizes, norms))


def _follow(calls: list[Any], name: str, out: Any) -> None:
    made = [t for t in tensors_made(out) if t.is_floating_point() and t.requires_grad]
    if not made or len(calls) >= MOST:
        return
    out = made[0]
    grads: list[torch.Tensor] = []
    calls.append((name, torch.linalg.vector_norm(out.detach()) / max(out.numel(), 1) ** 0.5, grads))
    out.register_hook(lambda grad: grads.append(torch.linalg.vector_norm(grad.detach())))
