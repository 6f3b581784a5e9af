"""One forward and one backward, recorded, without leaving gradients behind.

Gradients come from `torch.autograd.grad`, so that no `.grad` is touched, neither the model's nor that of anything else
that the loss hangs on.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.before.calls import Calls
from nbdebug.chapters.training.run.checkup import loss_root
from nbdebug.observe.tensors import tensors_made

CONTAINERS = (list, tuple, dict, set, deque)
DEPTH = 4


@dataclasses.dataclass
class Step:
    """gradients: by id of the leaf, None where it got none; reached: ids of the leaves that autograd leads to."""

    calls: Calls
    loss: torch.Tensor
    value: float
    reached: set[int]
    gradients: dict[int, torch.Tensor | None]


def begin(model: nn.Module, batch: Any) -> Calls:
    """What will record a forward of this batch."""
    return Calls(model, [*model.named_parameters(), *hidden_parameters(model)], tensors_made(batch))


def record(calls: Calls, ask: Callable[[Any, Any], Any], batch: Any) -> Any:
    """Call the loss under observation. The user's own exceptions pass; `calls.failed` then tells where."""
    handles = calls.hooks()
    try:
        with calls:
            return ask(calls.model, batch)
    finally:
        for handle in handles:
            handle.remove()
        calls.stack.clear()


def run(calls: Calls, ask: Callable[[Any, Any], Any], batch: Any) -> Step:
    """The loss of one batch and its gradients. Raises TypeError where loss_fn returns no tensor."""
    with torch.enable_grad():
        root = loss_root(record(calls, ask, batch))
    if not isinstance(root, torch.Tensor):
        raise TypeError(
            "loss_fn has to return a tensor (or a tuple, dict or object that holds it); it returned "
            f"{type(root).__name__}"
        )
    loss = root if root.dim() == 0 else root.float().mean()
    leaves = list(leaves_of(loss))
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    gradients: dict[int, torch.Tensor | None] = {id(leaf): grad for leaf, grad in zip(leaves, found)}
    calls.kept.append((root, loss, leaves))
    return Step(calls, root, float(loss.detach()), {id(leaf) for leaf in leaves}, gradients)


def leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves that want a gradient and that autograd reaches from the loss."""
    if loss.grad_fn is None:
        if loss.requires_grad:
            yield loss
        return
    todo, seen = [loss.grad_fn], {loss.grad_fn}
    while todo:
        node: Any = todo.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def hidden_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters in plain lists, tuples and dicts of a model, which `model.parameters()` does not give, with their
    names."""
    known = {id(p) for p in model.parameters()}
    inside = {id(m) for m in model.modules()}
    found: list[tuple[str, torch.Tensor]] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and isinstance(value, CONTAINERS):
                found += _in_container(f"{name}.{key}" if name else key, value, known, inside, 0)
    return found


def _in_container(
    name: str, value: Any, known: set[int], inside: set[int], depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, nn.Module):
        if id(value) not in inside:
            for own, parameter in value.named_parameters(prefix=name):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    yield own, parameter
    elif isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf and id(value) not in known:
            known.add(id(value))
            yield name, value
    elif isinstance(value, CONTAINERS) and depth < DEPTH:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in pairs:
            yield from _in_container(f"{name}.{key}", member, known, inside, depth + 1)


def bad(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient holds something that is not finite."""
    if gradient is None:
        return False
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    return not math.isfinite(float(values.float().abs().sum()))
