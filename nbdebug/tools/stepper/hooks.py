"""The layers of a model while it runs: which one is being called, from where, and what each has made so far."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbdebug.observe.backward import Backward, input_nodes
from nbdebug.observe.locations import locate
from nbdebug.observe.modules import plain_name
from nbdebug.observe.tensors import output_tensors
from nbdebug.tools.stepper import events as numbers
from nbdebug.tools.stepper.events import BEFORE, LayerCall, LayerPlace

_node_number = torch._C._autograd._get_sequence_nr
"""What autograd will number the next node that this thread makes."""


@dataclasses.dataclass
class LayerState:
    """What a layer has done: calls; low, high: the range of its last output; finite: of its last output, None before;
    gradient: whether what its backward has handed on was finite, None before."""

    name: str
    kind: str
    depth: int
    calls: int = 0
    low: float | None = None
    high: float | None = None
    finite: bool | None = None
    gradient: bool | None = None


class Layers:
    """Hooks on every module of the model, and on a criterion that is one. all: by module, in the order of
    `named_modules`; calls: all that have ended; outside: nodes of autograd that the step finds in its batch, made by
    another thread, which numbers its own."""

    def __init__(self, model: nn.Module, batch: Any = None, loss_fn: Any = None):
        self.all: dict[nn.Module, LayerState] = {}
        for raw, module in model.named_modules():
            name = plain_name(raw)
            self.all.setdefault(module, LayerState(name, type(module).__name__, name.count(".") + 1 if name else 0))
        if isinstance(loss_fn, nn.Module):
            self.all.setdefault(loss_fn, LayerState("loss_fn", type(loss_fn).__name__, 0))
        self.calls: list[LayerCall] = []
        self.outside = [tensor.grad_fn for tensor in (*output_tensors(batch), *model.buffers())]
        self.stack: list[LayerCall] = []
        self.raised: LayerCall | None = None
        self._handles: list[Any] = []
        self._run: Any = None

    def connect(self, run: Any) -> None:
        """run: its border, begins and ends are called."""
        self._run = run

    def attach(self) -> None:
        for module in self.all:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks of this kind: it is a part of the layer around it
            self._handles += [
                module.register_forward_pre_hook(_LayerHook(self, "enter"), with_kwargs=True),
                module.register_forward_hook(_LayerHook(self, "leave"), always_call=True),
            ]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def forget(self) -> None:
        """Release every tensor and node."""
        self.calls, self.outside, self.stack, self.raised, self._run = [], [], [], None, None

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        layer, parent = self.all[module], self.stack[-1] if self.stack else None
        layer.calls += 1
        call = LayerCall(
            module, layer.name, layer.calls, parent, len(self.stack), site=locate().site, handled=sys.exc_info()[1]
        )
        inputs = numbers.argument_tensors(module, args, kwargs)
        call.received = _edges(inputs)
        call.leaves = {id(tensor): name for name, tensor in inputs if tensor.requires_grad and tensor.grad_fn is None}
        call.given = [(name, tensor.detach()) for name, tensor in inputs]
        call.versions = [_version(tensor) for _, tensor in call.given]
        call.nodes = (_node_number(), 0)
        self.stack.append(call)
        self._run.begins(call)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not any(call.module is module for call in self.stack):
            return
        while (call := self.stack[-1]).module is not module:
            self.stack.pop()  # it ended in an exception before its hooks ran
        error = sys.exc_info()[1]
        if error is not None and error is not call.handled:  # on its way through here
            self.raised = (
                self.raised
                if self.raised is not None and self.raised.handled is error
                else dataclasses.replace(call, handled=error, given=[], versions=[])
            )
        else:
            call.nodes = (call.nodes[0], _node_number())
            call.returned = _edges(numbers.named_tensors(output, "output"))
            self.calls.append(call)
            self._run.ends(call, output)
        call.given, call.versions = [], []
        self.stack.pop()

    def raised_in(self, error: BaseException) -> LayerPlace | None:
        """The innermost layer that an exception, or what it was raised from, came out of."""
        chain: list[BaseException | None] = [error]
        while chain[-1] is not None and len(chain) < 10:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)
        call = self.raised
        return call.place(BEFORE) if call is not None and any(e is call.handled for e in chain) else None

    def remarks(self, culprit: bool) -> list[str]:
        """Notes on the layer that has just run. culprit: it made something that is not finite."""
        call = self.stack[-1]
        remarks = [
            f"The layer changed `{name}` in place: the numbers are those after the change."
            for (name, tensor), version in zip(call.given, call.versions)
            if _version(tensor) != version
        ]
        if culprit:
            remarks += [
                f"Its parameter `{name}` is not finite itself."
                for name, parameter in call.module.named_parameters(recurse=False)
                if not numbers.finite([parameter])
            ]
            if next(call.module.children(), None) is not None:
                remarks.append("No layer inside it did that: its own forward did, between them.")
        return remarks

    def note(self, call: LayerCall, low: float | None, high: float | None, finite: bool) -> None:
        layer = self.all[call.module]
        layer.low, layer.high, layer.finite = low, high, finite

    def note_gradient(self, call: LayerCall, finite: bool) -> None:
        layer = self.all[call.module]
        layer.gradient = finite and layer.gradient is not False

    def in_order(self) -> list[LayerCall]:
        """The calls as they began, those around others first."""
        self.calls.sort(key=lambda call: (call.nodes[0], call.depth))
        return self.calls

    def dispatch(self, method: str, *args: Any) -> None:
        if self._run is not None and torch._C._current_autograd_node() is None:  # else: computed again for backward
            self._run.border(getattr(self, method), *args)


class _LayerHook:
    """A hook that stays out of copies: a deepcopy or a pickle of the model has one that does nothing."""

    def __init__(self, layers: Layers, method: str):
        self.layers, self.method = layers, method

    def __call__(self, *args: Any) -> None:
        __tracebackhide__ = True
        self.layers.dispatch(self.method, *args)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _edges(tensors: list[tuple[str, torch.Tensor]]) -> dict[tuple[Any, int], str]:
    return {(tensor.grad_fn, tensor.output_nr): name for name, tensor in tensors if tensor.grad_fn is not None}


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode: nothing is counted
        return None


_LEAF = 2**64 - 1
"""What autograd numbers nodes that collect a leaf's gradient."""
Named = list[tuple[str, torch.Tensor]]


@dataclasses.dataclass(eq=False)
class LayerBackward:
    """A call's backward. exits: how many have not run yet; came, went: gradients by name; finite: all that went on."""

    call: LayerCall
    exits: int = 0
    begun: bool = False
    finite: bool = True
    came: Named = dataclasses.field(default_factory=list)
    went: dict[Any, tuple[str, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def add(self, edge: Any, name: str, gradient: torch.Tensor) -> None:
        """What reaches the same tensor by several ways counts together."""
        before = self.went.get(edge)
        self.went[edge] = (name, gradient) if before is None else (before[0], before[1] + gradient)


class NodeHooks:
    """Hooks on the nodes of one backward. begins(call, gradients) and ended(call, came, went, whether that is finite)
    are dispatch of layers; both may wait. finite: says whether tensors are; border: calls what may
    fail."""

    def __init__(
        self,
        calls: list[LayerCall],
        outside: list[Any],
        begins: Callable[[LayerCall, Named], None],
        ended: Callable[[LayerCall, Named, Named, bool], None],
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
        entering: dict[Any, list[LayerBackward]] = {}
        leaving: dict[Any, list[tuple[LayerBackward, list[tuple[int, Any, str | None]]]]] = {}
        for call in self.calls:
            passage, (first, end) = LayerBackward(call), call.nodes
            own = {id(p): name for name, p in call.module.named_parameters(recurse=False)}
            own |= call.leaves
            for node in nodes[bisect.bisect_left(numbers, first) : bisect.bisect_left(numbers, end)]:
                if above[node] >= end:
                    entering.setdefault(node, []).append(passage)
                crossing = [
                    (i, edge, _named(edge, own, call))
                    for i, edge in enumerate(node.next_functions)
                    if edge[0] is not None and not first <= self._sequence_number(edge[0]) < end
                ]
                if crossing:
                    passage.exits += 1
                    leaving.setdefault(node, []).append((passage, crossing))
        for node, passages in entering.items():  # calls are in the order in which they began: outermost first
            self._handles.append(node.register_prehook(_Arriving(self, node, passages)))
        for node, exits in leaving.items():
            self._handles.append(node.register_hook(_Leaving(self, exits[::-1])))

    def _sequence_number(self, node: Any) -> int:
        return _LEAF if node in self._outside else _number(node)

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._outside = {}

    def arrive(self, node: Any, passages: list[LayerBackward], gradients: tuple[Any, ...]) -> None:
        arrived = [(i, g.detach()) for i, g in enumerate(gradients) if isinstance(g, torch.Tensor)]
        finite = self.finite([g for _, g in arrived])
        for passage in passages:
            passage.call.finite_gradient = (passage.call.finite_gradient or not passage.begun) and finite
            passage.came += [(passage.call.returned.get((node, i), "a value inside"), g) for i, g in arrived]
            if not passage.begun:
                passage.begun = True
                self.begins(passage.call, passage.came)

    def leave(self, exits: list[tuple[LayerBackward, Any]], gradients: tuple[Any, ...]) -> None:
        for passage, edges in exits:
            leaving = [
                (edge, name, gradients[i].detach())
                for i, edge, name in edges
                if i < len(gradients) and isinstance(gradients[i], torch.Tensor)
            ]
            passage.finite = self.finite([g for _, _, g in leaving]) and passage.finite
            for edge, name, gradient in leaving:
                if name is not None:
                    passage.add(edge, name, gradient)
            passage.exits -= 1
            if passage.exits == 0:
                arrived, went = passage.came, list(passage.went.values())
                passage.came, passage.went = [], {}
                self.ended(passage.call, arrived, went, passage.finite)


class _Arriving:
    def __init__(self, whole: NodeHooks, node: Any, passages: list[LayerBackward]):
        self.whole, self.node, self.passages = whole, node, passages

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        self.whole.border(self.whole.arrive, self.node, self.passages, gradients)


class _Leaving:
    def __init__(self, whole: NodeHooks, exits: list[Any]):
        self.whole, self.exits = whole, exits

    def __call__(self, gradients: tuple[Any, ...], arrived: tuple[Any, ...]) -> None:
        self.whole.border(self.whole.leave, self.exits, gradients)


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _named(edge: tuple[Any, int], own: dict[int, str], call: LayerCall) -> str | None:
    """The name of what a gradient goes to: something that the layer was given, or a parameter of its own; None for a
    parameter of a layer inside it, which tells of it itself."""
    leaf = getattr(edge[0], "variable", None)
    if leaf is not None:
        return own.get(id(leaf), None if isinstance(leaf, nn.Parameter) else "a tensor from elsewhere")
    return call.received.get(edge, "a tensor from elsewhere")


def _reachable(roots: list[Any], without: Any = ()) -> dict[Any, int]:
    """Every node behind these, leaves left out, with the highest number of a node before it (of a root: no limit)."""
    nodes = {root: _LEAF for root in roots if root not in without and _number(root) != _LEAF}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        number = _number(node)
        for behind in input_nodes(node):
            if behind in without or _number(behind) == _LEAF:
                continue
            if behind not in nodes:
                todo.append(behind)
            nodes[behind] = max(nodes.get(behind, 0), number)
    return nodes
