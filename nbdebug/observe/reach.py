"""Does a loss lead back to a certain model, and is the graph of its output still alive?

The autograd node that made an output gets a sign. A loss that was computed from this output leads to it, usually in a
handful of steps; a loss of another model, trained beside this one, does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MOST_NODES = 10_000
"""Nodes looked at before a loss is taken to lead there; only the loss of another, very large model has so many."""


class _Alive:
    """Lives as long as the autograd node that it is noted on."""


def sign(outputs: Iterable[Any], key: str) -> list[weakref.ref]:
    """Sign the nodes that made these outputs; references that die with them."""
    signs = []
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            alive = _Alive()
            output.grad_fn.metadata[key] = alive  # type: ignore[index]
            signs.append(weakref.ref(alive))
    return signs


def leads_to(roots: Iterable[torch.Tensor], key: str, parameters: Callable[[], Iterable[torch.Tensor]]) -> bool:
    """Whether one of these roots of backward was computed from a signed output, or from one of the parameters."""
    own: set[int] | None = None
    roots = list(roots)
    seen: set[Any] = set()
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    if len(todo) < len(roots):  # a leaf: backward from a parameter itself
        own = {id(p) for p in parameters()}
        if any(id(root) in own for root in roots):
            return True
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if key in node.metadata or len(seen) > _MOST_NODES:  # type: ignore[operator]
            return True
        behind = node.next_functions
        if not behind and (leaf := getattr(node, "variable", None)) is not None:
            own = {id(p) for p in parameters()} if own is None else own
            if id(leaf) in own:
                return True
        todo += [following for following, _ in behind if following is not None]
    return False
