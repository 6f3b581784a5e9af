"""Backward, layer by layer, without a hook on any tensor and without a change to the graph.

The step's forward runs in one thread, so autograd numbers the nodes it makes in order, and the nodes of a call are
those between two numbers. When backward begins, the graph is walked once from the loss: of each call

    entrances   nodes that get a gradient from outside the call: the gradient of what the layer has returned
    exits       nodes that hand one on to outside: to what the layer was given, and to parameters

The first entrance begins the layer's backward, the last exit ends it. (PyTorch's own full backward hooks put a node of
theirs around each layer, which forbids in-place ops on its outputs.)
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbdebug.observe.engine import Backward
from nbdebug.stepper.places import Call

_LEAF = 2**64 - 1
"""What autograd numbers nodes that collect a leaf's gradient."""
Named = list[tuple[str, torch.Tensor]]


@dataclasses.dataclass(eq=False)
class Passage:
    """A call's backward. exits: how many have not run yet; came, went: gradients by name; finite: all that went on."""

    call: Call
    exits: int = 0
    begun: bool = False
    finite: bool = True
    came: Named = dataclasses.field(default_factory=list)
    went: dict[Any, tuple[str, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def add(self, edge: Any, name: str, gradient: torch.Tensor) -> None:
        """What reaches the same tensor by several ways counts together."""
        before = self.went.get(edge)
        self.went[edge] = (name, gradient) if before is None else (before[0], before[1] + gradient)


class Gradients:
    """Hooks on the nodes of one backward. begins(call, gradients) and ended(call, came, went, whether that is finite)
    are told of layers; both may wait. finite: says whether tensors are; border: calls what may
    fail."""

    def __init__(
        self,
        calls: list[Call],
        outside: list[Any],
        begins: Callable[[Call, Named], None],
        ended: Callable[[Call, Named, Named, bool], None],
        finite: Callable[[list[torch.Tensor]], bool],
        border: Callable[..., None],
    ):
        self.calls, self.begins, self.ended, self.finite, self.border = calls, begins, ended, finite, border
        self._outside = _reachable([node for node in outside if node is not None])
        self._handles: list[Any] = []

    def attach(self, backward: Backward) -> None:
        roots = [
            node for root in backward.roots if isinstance(root, torch.Tensor) and (node := root.grad_fn) is not None
        ]
        above = _reachable(roots, self._outside)
        nodes = sorted(above, key=_number)
        numbers = [_number(node) for node in nodes]
        entering: dict[Any, list[Passage]] = {}
        leaving: dict[Any, list[tuple[Passage, list[tuple[int, Any, str | None]]]]] = {}
        for call in self.calls:
            passage, (first, end) = Passage(call), call.nodes
            own = {id(p): name for name, p in call.module.named_parameters(recurse=False)}
            own |= call.leaves
            for node in nodes[bisect.bisect_left(numbers, first) : bisect.bisect_left(numbers, end)]:
                if above[node] >= end:
                    entering.setdefault(node, []).append(passage)
                gone = [
                    (i, edge, _named(edge, own, call))
                    for i, edge in enumerate(node.next_functions)
                    if edge[0] is not None and not first <= self._made(edge[0]) < end
                ]
                if gone:
                    passage.exits += 1
                    leaving.setdefault(node, []).append((passage, gone))
        for node, passages in entering.items():  # calls are in the order in which they began: outermost first
            self._handles.append(node.register_prehook(_Arriving(self, node, passages)))
        for node, exits in leaving.items():
            self._handles.append(node.register_hook(_Leaving(self, exits[::-1])))

    def _made(self, node: Any) -> int:
        return _LEAF if node in self._outside else _number(node)

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._outside = {}

    def arrive(self, node: Any, passages: list[Passage], gradients: tuple[Any, ...]) -> None:
        came = [(i, g.detach()) for i, g in enumerate(gradients) if isinstance(g, torch.Tensor)]
        finite = self.finite([g for _, g in came])
        for passage in passages:
            passage.call.finite_gradient = (passage.call.finite_gradient or not passage.begun) and finite
            passage.came += [(passage.call.returned.get((node, i), "a value inside"), g) for i, g in came]
            if not passage.begun:
                passage.begun = True
                self.begins(passage.call, passage.came)

    def leave(self, exits: list[tuple[Passage, Any]], gradients: tuple[Any, ...]) -> None:
        for passage, gone in exits:
            told = [
                (edge, name, gradients[i].detach())
                for i, edge, name in gone
                if i < len(gradients) and isinstance(gradients[i], torch.Tensor)
            ]
            passage.finite = self.finite([g for _, _, g in told]) and passage.finite
            for edge, name, gradient in told:
                if name is not None:
                    passage.add(edge, name, gradient)
            passage.exits -= 1
            if passage.exits == 0:
                came, went = passage.came, list(passage.went.values())
                passage.came, passage.went = [], {}
                self.ended(passage.call, came, went, passage.finite)


class _Arriving:
    def __init__(self, whole: Gradients, node: Any, passages: list[Passage]):
        self.whole, self.node, self.passages = whole, node, passages

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        self.whole.border(self.whole.arrive, self.node, self.passages, gradients)


class _Leaving:
    def __init__(self, whole: Gradients, exits: list[Any]):
        self.whole, self.exits = whole, exits

    def __call__(self, gradients: tuple[Any, ...], came: tuple[Any, ...]) -> None:
        self.whole.border(self.whole.leave, self.exits, gradients)


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _named(edge: tuple[Any, int], own: dict[int, str], call: Call) -> str | None:
    """The name of what a gradient goes to: something that the layer was given, or a parameter of its own; None for a
    parameter of a layer inside it, which tells of it itself."""
    leaf = getattr(edge[0], "variable", None)
    if leaf is not None:
        return own.get(id(leaf), None if isinstance(leaf, nn.Parameter) else "a tensor from elsewhere")
    return call.received.get(edge, "a tensor from elsewhere")


def _reachable(roots: list[Any], without: Any = ()) -> dict[Any, int]:
    """Every node behind these, leaves left out, with the highest number of a node before it (of a root: no limit)."""
    found = {root: _LEAF for root in roots if root not in without and _number(root) != _LEAF}
    todo = list(found)
    while todo:
        node = todo.pop()
        number = _number(node)
        for behind, _ in node.next_functions:
            if behind is None or behind in without or _number(behind) == _LEAF:
                continue
            if behind not in found:
                todo.append(behind)
            found[behind] = max(found.get(behind, 0), number)
    return found
