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

from nbdebug.chapters.training.facts_run import Point, Through
from nbdebug.chapters.training.run.checkup import loss_root
from nbdebug.chapters.training.run.sources import unnoticed
from nbdebug.observe.tensors import read, tensors_made

MOMENTS = 5
"""Shorter sequences have no way to speak of."""
MOST = 2000
"""Calls that are followed."""


def flow(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any
) -> tuple[tuple[Point, ...], tuple[Through, ...]]:
    """The calls of layers with weights, in order, and the ways through time. The gradients of parameters are left as
    they are. Raises what the loss raises, and RuntimeError where it has no gradient."""
    calls: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []
    times: list[tuple[str, list[torch.Tensor]]] = []
    given: list[torch.Tensor] = []  # what recurrent modules are given, where no trained parameter lies before them
    handles = []
    for name, module in model.named_modules():
        if any(p.dim() > 1 for p in module._parameters.values() if p is not None):
            handles.append(module.register_forward_hook(lambda module, args, out, name=name: _follow(calls, name, out)))
        if isinstance(module, nn.RNNBase):
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, name=name: _through(times, given, name, module, args)
                )
            )
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with unnoticed(loss_fn), torch.enable_grad():
            root = loss_root(loss_fn(model, batch))
            torch.autograd.grad(root, [*trained, *given], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    with_gradient = [(name, size, grads[0]) for name, size, grads in calls if grads]
    sizes = read([size.float() for _, size, _ in with_gradient])
    norms = read([norm.float() for _, _, norm in with_gradient])
    points = tuple(Point(name, size, norm) for (name, _, _), size, norm in zip(with_gradient, sizes, norms))
    ways = [Through(name, len(norms[0]), float(norms[0][0]), float(norms[0][-1])) for name, norms in times if norms]
    return points, (*ways, *_again_and_again(points))


def _again_and_again(points: tuple[Point, ...]) -> list[Through]:
    """Modules that are called many times in one pass: a recurrence that is written by hand."""
    calls: dict[str, list[float]] = {}
    for point in points:
        calls.setdefault(point.module, []).append(point.gradient)
    return [Through(name, len(norms), norms[0], norms[-1]) for name, norms in calls.items() if len(norms) >= MOMENTS]


def _through(times: list[Any], leaves: list[torch.Tensor], name: str, module: nn.RNNBase, args: tuple[Any, ...]) -> Any:
    """Have the gradient at each moment of what a recurrent module is given told to `times`."""
    given = args[0]
    if not isinstance(given, torch.Tensor) or given.dim() != 3 or given.shape[1 if module.batch_first else 0] < MOMENTS:
        return None
    if not given.requires_grad:
        given = given.clone().requires_grad_(True)
        leaves.append(given)
    norms: list[torch.Tensor] = []
    times.append((name, norms))
    others = (0, 2) if module.batch_first else (1, 2)
    given.register_hook(lambda grad: norms.append(torch.linalg.vector_norm(grad.detach(), dim=others)))
    return (given, *args[1:])


def _follow(calls: list[Any], name: str, out: Any) -> None:
    made = [t for t in tensors_made(out) if t.is_floating_point() and t.requires_grad]
    if not made or len(calls) >= MOST:
        return
    out = made[0]
    grads: list[torch.Tensor] = []
    calls.append((name, torch.linalg.vector_norm(out.detach()) / max(out.numel(), 1) ** 0.5, grads))
    out.register_hook(lambda grad: grads.append(torch.linalg.vector_norm(grad.detach())))
