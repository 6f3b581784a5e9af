"""Rerun: runs the user's own step again, with hooks at its module calls that may change values there.

A module call is where a step can be changed without touching the user's code: inputs and outputs pass through hooks,
and a hook may return other values. `Rerun` runs a step once, records the calls in order, and what the step computed:
each loss, the gradients after each backward, the parameters at the end. A `RerunChange` says what to do at the calls;
two common changes are

    repair(tensor)                    the same tensor with its non-finite elements replaced by ordinary ones
    cut_gradient(tensor, callback)    the same values, cut off from the graph behind them

Calls inside backward (checkpointed blocks that are recomputed) are repetitions and do not count.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.backward import Backward, EngineWatch
from nbdebug.observe.tensors import all_finite, can_be_nonfinite, dense, fingerprint, finite, loss_in, tensors_in


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of a module. start, end: its numbers, from 0, in the order in which calls begin and end; parent: the
    call around it; batch: the first dimension of its first tensor argument."""

    start: int
    module: nn.Module
    parent: ModuleCall | None
    end: int | None = None
    batch: int | None = None

    @property
    def stack(self) -> list[ModuleCall]:
        """This call and those around it, outermost first."""
        return [*(self.parent.stack if self.parent else []), self]


@dataclasses.dataclass
class RerunEvent:
    """A result of the step. what: "loss", "gradients" or "parameters"; bad: the names of those that are not finite;
    ended: how many calls had ended by then; running: the innermost call that had not; prints: the fingerprint of each
    tensor by name, with `proof`."""

    what: str
    bad: frozenset[str]
    ended: int
    running: ModuleCall | None
    prints: dict[str, Any]


class RerunChange:
    """What a rerun does at its calls; this one does nothing. bad: names to count among the bad gradients."""

    def __init__(self) -> None:
        self.bad: set[str] = set()
        self.handles: list[Any] = []  # of hooks on the user's tensors; the rerun removes them

    def enter(self, call: ModuleCall, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Other arguments, or None to leave them as they are."""

    def leave(self, call: ModuleCall, output: Any) -> Any:
        """Another output, or None to leave it as it is."""


class Rerun:
    """One run of a step. Its results: calls; ended, the same in the order in which they ended; events; inputs, with
    `proof`, a fingerprint of the arguments of each outermost call; error, the exception that ended the step early;
    loss, the first number that the step returned or ran backward from."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        parameters: Callable[[], dict[str, torch.Tensor]],
        *,
        proof: bool = False,
        change: RerunChange | None = None,
    ):
        self.models, self.parameters = models, parameters
        self.proof, self.change = proof, change or RerunChange()
        self.calls: list[ModuleCall] = []
        self.ended: list[ModuleCall] = []
        self.events: list[RerunEvent] = []
        self.inputs: list[list[Any]] = []
        self.error: Exception | None = None
        self.loss: float | None = None
        self._stack: list[ModuleCall] = []
        self._thread = threading.get_ident()

    def run(self, step: Callable[[], Any]) -> Rerun:
        """Run the step. `error` takes its exception; an interrupt passes through. All hooks are removed at the end."""
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(uncompiled())
            self._attach(hooks)
            try:
                result = step()
            except Exception as error:
                self.error = error
                return self
        self._note("loss", _losses_in(result))
        self._note("parameters", self.parameters())
        return self

    def _attach(self, hooks: contextlib.ExitStack) -> None:
        hooks.callback(lambda: [handle.remove() for handle in self.change.handles])
        engine = EngineWatch(self._before_backward, self._after_backward)
        hooks.callback(engine.detach)
        engine.attach()
        for module in {m: None for model in self.models.values() for m in model.modules()}:
            hooks.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)

    @property
    def first_bad_event(self) -> int | None:
        return next((i for i, event in enumerate(self.events) if event.bad), None)

    def _note(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        bad = {name for name, tensor in tensors.items() if has_nonfinite(tensor)}
        if what == "loss" and self.loss is None:
            self.loss = next(
                (float(t.detach()) for t in tensors.values() if t.numel() == 1 and not t.is_complex()), None
            )
        if what == "gradients":
            bad |= self.change.bad
        prints = {name: fingerprint(tensor) for name, tensor in tensors.items()} if self.proof else {}
        running = self._stack[-1] if self._stack else None
        self.events.append(RerunEvent(what, frozenset(bad), len(self.ended), running, prints))

    def _before_backward(self, backward: Backward) -> None:
        if backward.accumulate:
            self._note("loss", {f"loss {i}": root for i, root in enumerate(backward.roots)})

    def _after_backward(self, backward: Backward, result: Any) -> None:
        if backward.accumulate:
            self._note("gradients", {n: p.grad for n, p in self.parameters().items() if p.grad is not None})

    @property
    def _ignored(self) -> bool:
        return threading.get_ident() != self._thread or torch._C._current_autograd_node() is not None

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self._ignored:
            return None
        parent = self._stack[-1] if self._stack else None
        inputs = tensors_in((args, kwargs))
        sizes = [t.shape[0] for t in inputs if t.dim()]
        call = ModuleCall(len(self.calls), module, parent, batch=sizes[0] if sizes else None)
        self.calls.append(call)
        self._stack.append(call)
        if parent is None and self.proof:
            self.inputs.append([*map(fingerprint, inputs), *_plain_values((args, kwargs))])
        return self.change.enter(call, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self._ignored or not any(call.module is module for call in self._stack):
            return None
        while (call := self._stack.pop()).module is not module:
            pass  # a call that ended in an exception, which the user's code caught
        call.end = len(self.ended)
        self.ended.append(call)
        return self.change.leave(call, output)


def has_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds an inf or a NaN."""
    values = dense(tensor)
    return values is not None and can_be_nonfinite(values) and not all_finite(values.detach())


def repair(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with its non-finite elements replaced, so that the code after it computes with ordinary numbers.

    They are replaced by finite elements of the same tensor, in turn, since their magnitude is what that code expects.
    Where there are none, by numbers between 1/4 and 3/4, which lie in the domain of every function (log, sqrt, acos,
    1 - x, 1 / x), no two neighbours equal, so that a variance is not zero. No gradient flows through a replaced
    element.
    """
    if tensor.layout is not torch.strided or not has_nonfinite(tensor):
        return tensor
    good = finite(tensor.detach())
    values = tensor.detach()[good].flatten()
    holes = torch.arange(int((~good).sum()), device=tensor.device)
    fill = values[holes % len(values)] if len(values) else (0.25 + (holes * 7 % 16) / 32).to(tensor.dtype)
    spread = torch.zeros_like(tensor.detach()).masked_scatter(~good, fill)
    return torch.where(good, tensor, spread)


def cut_gradient(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The same values without a graph: backward ends here, and `callback` gets the gradient that arrives."""
    if not tensor.requires_grad or not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return tensor
    return _CutGradient.apply(torch.zeros((), requires_grad=True, device="cpu"), tensor.detach(), callback)


class _CutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, callback: Any) -> torch.Tensor:
        ctx.callback = callback
        return tensor.data  # the same storage, but no view: code may still change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.callback(gradients[0])
        return None, None, None


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested tuples, lists, dicts and dataclasses with every tensor changed; the same object where nothing changes."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        new = [map_tensors(x, change) for x in tree]
        if all(a is b for a, b in zip(new, tree, strict=True)):
            return tree
        return type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
    if isinstance(tree, dict):
        parts, put = tree, lambda whole, key, value: whole.__setitem__(key, value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts, put = {f.name: getattr(tree, f.name, None) for f in dataclasses.fields(tree)}, object.__setattr__
    else:
        return tree
    replaced = {key: new for key, value in parts.items() if (new := map_tensors(value, change)) is not value}
    whole = copy.copy(tree) if replaced else tree
    for key, new in replaced.items():
        put(whole, key, new)
    return whole


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Within, compiled modules run as plain Python: a compiled graph calls no hooks of the modules inside it."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _losses_in(result: Any) -> dict[str, torch.Tensor]:
    """The losses in a step's result: a number, tensors, or an object or dict with a loss."""
    loss = loss_in(result)
    if isinstance(loss, torch.Tensor):
        result = loss
    if isinstance(result, float):
        result = torch.tensor(result, device="cpu")
    return {f"returned {i}": tensor for i, tensor in enumerate(tensors_in(result))}


def _plain_values(tree: Any) -> list[str]:
    """The plain values among a call's arguments, as text."""
    if isinstance(tree, (tuple, list)):
        return [text for x in tree for text in _plain_values(x)]
    if isinstance(tree, dict):
        return [text for key, x in tree.items() for text in (str(key), *_plain_values(x))]
    return [repr(tree)] if isinstance(tree, (int, float, str, complex)) else [type(tree).__name__]
