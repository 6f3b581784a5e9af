"""Backward: hooks around autograd's engine, optimizers and gradient scalers, and walks over the autograd graph.

`torch.autograd`'s one entry to its engine is wrapped for the length of a run: there the losses are known, as the
tensors that backward starts from. Optimizers have hooks of their own for this. The graph's nodes are walked from the
losses to the leaves; torch makes their Python objects on demand, so a walk keeps those that it has visited: an id
would be given to another node otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.autograd.graph
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.interrupts import Rescue, uninterrupted
from nbdebug.observe.locations import StackLines, locate
from nbdebug.observe.step_hooks import Patches, StepHook

UNCHANGED = 0.01
"""Relative difference of the norms of gradients that nobody has written to in between: far above rounding's."""
CLIPS = 20
"""Calls of clipping whose norm is read: reading it waits for the device."""


class Backward(NamedTuple):
    """One call of the engine. accumulate: it fills `.grad` (`backward()`), else it returns gradients
    (`autograd.grad`); stack: the lines that called it."""

    roots: tuple[torch.Tensor, ...]
    seeds: tuple[torch.Tensor | None, ...]
    inputs: tuple[torch.Tensor, ...]
    retain: bool
    create: bool
    accumulate: bool
    stack: StackLines


class EngineWatch:
    """Calls `before(backward)` and `after(backward, result)` for each backward call while attached; not for calls
    inside another backward (checkpointing), nor for those of a compiler that only traces. without_modes: run
    backward without dispatch modes, where nobody records its ops. thread: only calls from this thread, by its number
    (None: from all).

    However many watches there are, the engine's entry is wrapped once, and put back when the last of them is detached.
    """

    _attached: ClassVar[list[EngineWatch]] = []
    _wrapped: ClassVar[list[tuple[Any, Any, Any]]] = []  # module, its own entry, our wrapper

    def __init__(
        self, before: Callable[[Backward], None], after: Callable[[Backward, Any], None], without_modes: bool = False
    ):
        self.before, self.after, self.without_modes = before, after, without_modes
        self.keep_graph = False  # so that backward can be run once more
        self.thread: int | None = None

    @uninterrupted
    def attach(self) -> None:
        self._attached.append(self)
        Rescue.attach()
        if self._wrapped:
            return
        original = torch.autograd.graph._engine_run_backward
        wrapper = _watched(original, self._attached)
        modules: list[Any] = [torch.autograd.graph, torch.autograd]
        for module in modules:
            if module._engine_run_backward is original:
                self._wrapped.append((module, original, wrapper))
                module._engine_run_backward = wrapper

    @uninterrupted
    def detach(self) -> None:
        if self in self._attached:
            self._attached.remove(self)
            Rescue.detach()
        while self._wrapped and not self._attached:
            module, original, wrapper = self._wrapped.pop()
            if module._engine_run_backward is wrapper:  # else somebody has wrapped ours, which now only passes on
                module._engine_run_backward = original


def _watched(original: Callable, attached: list[EngineWatch]) -> Callable:
    """The engine's entry, which calls the watches that are attached at the time of the call."""

    def run_backward(roots: Any, seeds: Any, retain: bool, create: bool, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not attached or torch._C._current_autograd_node() is not None or isinstance(roots[0], FakeTensor):
            return original(roots, seeds, retain, create, inputs, *args, **kwargs)
        here = threading.get_ident()
        watches = [watch for watch in attached if watch.thread in (None, here)]
        if not watches:
            return original(roots, seeds, retain, create, inputs, *args, **kwargs)
        accumulate = kwargs.get("accumulate_grad", args[1] if len(args) > 1 else False)
        call = Backward(tuple(roots), tuple(seeds), tuple(inputs), retain, create, accumulate, locate())
        for watch in watches:
            watch.before(call)
        without_modes = any(watch.without_modes for watch in watches)
        retain = retain or any(watch.keep_graph for watch in watches)
        with _disable_current_modes() if without_modes else contextlib.nullcontext():
            result = original(roots, seeds, retain, create, inputs, *args, **kwargs)
        for watch in reversed(watches):
            watch.after(call, result)
        return result

    return run_backward


class OptimizerWatch:
    """Calls `before(optimizer, stack)` and `after(optimizer)` for each step while attached; thread: see above."""

    def __init__(
        self, before: Callable[[Any, StackLines], None], after: Callable[[Any], None], thread: int | None = None
    ):
        self.before, self.after, self.thread = before, after, thread
        self._handles: list[Any] = []

    @uninterrupted
    def attach(self) -> None:
        self._handles = [
            StepHook(lambda optimizer, *_: self.before(optimizer, locate()) if self._here() else None),
            StepHook(lambda optimizer, *_: self.after(optimizer) if self._here() else None, after=True),
        ]

    def _here(self) -> bool:
        return self.thread in (None, threading.get_ident())

    @uninterrupted
    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class ScalerListener(Protocol):
    """The callbacks of a ScalerWatch. Each: (scaler, optimizer)."""

    def unscaling(self, scaler: Any, optimizer: Any) -> None: ...
    def step_began(self, scaler: Any, optimizer: Any) -> None: ...
    def step_ended(self, scaler: Any, optimizer: Any) -> None: ...


class ScalerWatch:
    """Notifies a listener of enabled GradScalers while attached: a step that one of them skips never reaches the
    optimizer's own hooks. However many watch, the methods are wrapped once, and put back at the end. unscaling:
    `unscale_` begins, called by the user or by `step`; step_began, step_ended: of `step`. call: calls a method of the
    listener and catches its faults. updating(scaler), scaling(scaler): before each `update` and `scale`; called as they
    are."""

    _attached: ClassVar[list[ScalerWatch]] = []
    _wrapped: ClassVar[dict[str, tuple[Any, Any]]] = {}  # method: the original, our wrapper

    def __init__(
        self,
        listener: ScalerListener,
        call: Callable[..., Any],
        updating: Callable[[Any], None] = lambda scaler: None,
        scaling: Callable[[Any], None] = lambda scaler: None,
    ):
        self.listener, self.call, self.told = listener, call, {"update": updating, "scale": scaling}

    def attach(self) -> None:
        self._attached.append(self)
        if not self._wrapped:
            kind = torch.amp.GradScaler
            for name, wrap in (("unscale_", _unscale), ("step", _step), ("update", _told), ("scale", _told)):
                before = getattr(kind, name)
                self._wrapped[name] = before, wrap(before, self._attached)
                setattr(kind, name, self._wrapped[name][1])

    def detach(self) -> None:
        if self in self._attached:
            self._attached.remove(self)
        while self._wrapped and not self._attached:
            name, (before, ours) = self._wrapped.popitem()
            if getattr(torch.amp.GradScaler, name) is ours:  # else somebody has wrapped ours, which now only passes on
                setattr(torch.amp.GradScaler, name, before)

    @staticmethod
    def follows(scaler: Any) -> bool:
        """Whether its `update` is the one that is wrapped; FSDP's scaler has its own."""
        return type(scaler).update is torch.amp.GradScaler.update

    def notify(self, what: str, scaler: Any, optimizer: Any) -> None:
        if scaler.is_enabled():
            self.call(getattr(self.listener, what), scaler, optimizer)


def _unscale(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def unscale_(self: Any, optimizer: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.notify("unscaling", self, optimizer)
        return before(self, optimizer)

    return unscale_


def _step(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.notify("step_began", self, optimizer)
        result = before(self, optimizer, *args, **kwargs)
        for watch in list(attached):
            watch.notify("step_ended", self, optimizer)
        return result

    return step


def _told(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.told[before.__name__](self)
        return before(self, *args, **kwargs)

    return called


class CarriedScale:
    """Steps of optimizers on gradients that still carry the scale which `GradScaler.scale` has put into their loss.
    steps: of each, the norm of its gradients, and the scale. Gradients that somebody has changed since the backward
    don't count: they may have been divided by hand."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._scale: float | None = None  # of the loss that goes backward next
        self._left: dict[int, tuple[float, float]] = {}  # optimizer -> the norm that a scaled backward left, the scale

    def scaling(self, scaler: Any) -> None:
        self._scale = float(scaler.get_scale())

    def backward_ended(self, norms: Mapping[int, float]) -> None:
        """norms: of the gradients, by the optimizer's id."""
        scale, self._scale = self._scale, None
        self._left = {} if scale is None else {key: (norm, scale) for key, norm in norms.items()}

    def unscaling(self, optimizer: Any) -> None:
        self._left.pop(id(optimizer), None)

    def stepping(self, optimizer: Any, norm_of: Callable[[Any], float]) -> None:
        left, scale = self._left.pop(id(optimizer), (0.0, 1.0))
        itself = getattr(optimizer, "grad_scale", None) is not None  # a fused one divides by the scale as it steps
        if 0 < left < math.inf and scale != 1 and not itself and abs(norm_of(optimizer) / left - 1) < UNCHANGED:
            self.steps.append((left, scale))


class ClipWatch:
    """Calls of torch's clipping by norm while attached, from wherever it was imported. calls: of the first of them, the
    limit, the norm that was there, and the user's line."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float, Any]] = []
        self._patches = Patches()

    def attach(self) -> None:
        self._patches.put_loaded([("torch.nn.utils.clip_grad", "_clip_grads_with_norm_")], self._clipping)

    def detach(self) -> None:
        self._patches.undo()

    @property
    def without_gradients(self) -> tuple[float, Any] | None:
        """Limit and line, where none of the first calls has found a gradient."""
        return None if len(self.calls) < CLIPS or any(norm for _, norm, _ in self.calls) else self.calls[0][::2]

    def _clipping(self, original: Any, parameters: Any, limit: Any, norm: Any, *more: Any, **named: Any) -> Any:
        if len(self.calls) < CLIPS:
            self.calls.append((float(limit), float(norm), locate().site))
        return original(parameters, limit, norm, *more, **named)


def input_nodes(node: Any) -> list[Any]:
    """The nodes whose outputs a node took, in the order of its inputs; an input that wants no gradient has none."""
    return [before for before, _ in node.next_functions if before is not None]


def graph_nodes(starts: Iterable[Any], known: Container[Any] = ()) -> Iterator[Any]:
    """Every node of the graph behind these nodes (None for a tensor without one), each once: depth first, the last
    input of a node first. Not into nodes that are `known`, which may grow meanwhile."""
    todo = [node for node in starts if node is not None]
    visited: set[Any] = set()
    while todo:
        node = todo.pop()
        if node not in visited and node not in known:
            visited.add(node)
            yield node
            todo += input_nodes(node)


def graph_levels(starts: Iterable[Any]) -> Iterator[list[Any]]:
    """The same nodes by their distance from the starts, the nearest first."""
    level = [node for node in dict.fromkeys(starts) if node is not None]
    visited = set(level)
    while level:
        yield level
        following = dict.fromkeys(before for node in level for before in input_nodes(node))
        level = [node for node in following if node not in visited]
        visited.update(level)


def graph_leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves into whose `.grad` a backward from here adds; none for a tensor without a graph."""
    for node in graph_nodes([loss.grad_fn]):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


_MOST_NODES = 10_000
"""Nodes visited before a loss is assumed to depend on the model; only that of another, very large model has more."""


class _Tag:
    """Lives as long as the autograd node that it is attached to."""


def tag_nodes(outputs: Iterable[Any], key: str) -> list[weakref.ref]:
    """Attach a tag to the nodes that made these outputs. Returns weak references, which die with the nodes."""
    tags = []
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            tag = _Tag()
            output.grad_fn.metadata[key] = tag  # type: ignore[index]
            tags.append(weakref.ref(tag))
    return tags


def leads_to(roots: Iterable[torch.Tensor], key: str, parameters: Callable[[], Iterable[torch.Tensor]]) -> bool:
    """Whether one of these roots of backward was computed from a tagged output, or from one of the parameters."""
    own: set[int] | None = None
    roots = list(roots)
    if any(root.grad_fn is None for root in roots):  # a leaf: backward from a parameter itself
        own = {id(p) for p in parameters()}
        if any(id(root) in own for root in roots):
            return True
    for number, node in enumerate(graph_nodes(root.grad_fn for root in roots), 1):
        if key in node.metadata or number > _MOST_NODES:
            return True
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
            own = {id(p) for p in parameters()} if own is None else own
            if id(leaf) in own:
                return True
    return False
