"""Run the step itself again, watched at its module calls, and changed there.

A module call is where a step can be cut open without touching the user's code: what goes in and what comes out passes
through hooks, and a hook may hand on something else. `Rerun` runs a step once, keeps the calls in order, and notes what
the step came to: each loss, the gradients after each backward, the parameters at the end. What is done at the calls is
a `Change`; two that are often wanted are

    mend(tensor)          the same tensor with its non-finite elements replaced by ordinary ones
    cut(tensor, look)     the same values, with nothing behind them for backward to run through

Calls that backward makes (checkpointed blocks that are computed again) are repetitions and do not count.
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
from nbdebug.observe.tensors import all_finite, can_be_nonfinite, dense, fingerprint, finite, tensors_in


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of a module. start and end count from 0 in the order in which calls begin and end; parent: the call
    around it; batch: the first dimension of its first tensor argument."""

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
    """Something that the step came to. what: "loss", "gradients" or "parameters". bad: names of what is not finite.
    ended: how many calls had ended; running: the innermost one that had not. prints: the fingerprint of each tensor by
    name, when a proof is wanted."""

    what: str
    bad: frozenset[str]
    ended: int
    running: ModuleCall | None
    prints: dict[str, Any]


class RerunChange:
    """What is done at the calls of a rerun; here: nothing. bad: names to count among the bad gradients."""

    def __init__(self) -> None:
        self.bad: set[str] = set()
        self.handles: list[Any] = []  # of hooks on the user's tensors; the rerun removes them

    def enter(self, call: ModuleCall, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Other arguments, or None to leave them as they are."""

    def leave(self, call: ModuleCall, output: Any) -> Any:
        """Another output, or None to leave it as it is."""


class Rerun:
    """One run of a step.

    Afterwards: calls; ended, the same in the order in which they ended; events; inputs, a fingerprint of what each
    outermost call was given (with `proof`); error, the exception that ended the step early, if one did.
    """

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
        self._stack: list[ModuleCall] = []
        self._thread = threading.get_ident()

    def run(self, step: Callable[[], Any]) -> Rerun:
        """Run the step. Its exceptions end in `error`; an interrupt passes. Every hook is gone afterwards."""
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(uncompiled())
            self._attach(hooks)
            try:
                returned = step()
            except Exception as error:
                self.error = error
                return self
        self._note("loss", _losses_in(returned))
        self._note("parameters", self.parameters())
        return self

    def _attach(self, hooks: contextlib.ExitStack) -> None:
        hooks.callback(lambda: [handle.remove() for handle in self.change.handles])
        engine = EngineWatch(self._backward_begins, self._backward_ended)
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
        if what == "gradients":
            bad |= self.change.bad
        prints = {name: fingerprint(tensor) for name, tensor in tensors.items()} if self.proof else {}
        running = self._stack[-1] if self._stack else None
        self.events.append(RerunEvent(what, frozenset(bad), len(self.ended), running, prints))

    def _backward_begins(self, backward: Backward) -> None:
        if backward.accumulate:
            self._note("loss", {f"loss {i}": root for i, root in enumerate(backward.roots)})

    def _backward_ended(self, backward: Backward, result: Any) -> None:
        if backward.accumulate:
            self._note("gradients", {n: p.grad for n, p in self.parameters().items() if p.grad is not None})

    @property
    def _elsewhere(self) -> bool:
        return threading.get_ident() != self._thread or torch._C._current_autograd_node() is not None

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self._elsewhere:
            return None
        parent = self._stack[-1] if self._stack else None
        given = tensors_in((args, kwargs))
        sizes = [t.shape[0] for t in given if t.dim()]
        call = ModuleCall(len(self.calls), module, parent, batch=sizes[0] if sizes else None)
        self.calls.append(call)
        self._stack.append(call)
        if parent is None and self.proof:
            self.inputs.append([*map(fingerprint, given), *_numbers((args, kwargs))])
        return self.change.enter(call, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self._elsewhere or not any(call.module is module for call in self._stack):
            return None
        while (call := self._stack.pop()).module is not module:
            pass  # a call that ended in an exception which the user's code caught
        call.end = len(self.ended)
        self.ended.append(call)
        return self.change.leave(call, output)


def has_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds an inf or a NaN."""
    values = dense(tensor)
    return values is not None and can_be_nonfinite(values) and not all_finite(values.detach())


def repair(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with its non-finite elements replaced, so that what follows has ordinary numbers to work on.

    They are replaced by finite elements of the same tensor, in turn: those are of the size that the code after it is
    used to. Where there are none, by numbers between 1/4 and 3/4, which every function takes (log, sqrt, acos, 1 - x,
    1 / x), no two neighbours alike, so that a variance is not zero. No gradient flows through a replaced element.
    """
    if tensor.layout is not torch.strided or not has_nonfinite(tensor):
        return tensor
    good = finite(tensor.detach())
    sound = tensor.detach()[good].flatten()
    wanted = torch.arange(int((~good).sum()), device=tensor.device)
    fill = sound[wanted % len(sound)] if len(sound) else (0.25 + (wanted * 7 % 16) / 32).to(tensor.dtype)
    spread = torch.zeros_like(tensor.detach()).masked_scatter(~good, fill)
    return torch.where(good, tensor, spread)


def cut_gradient(tensor: torch.Tensor, look: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The same values, from nowhere: backward ends here, and `look` is told the gradient that arrives."""
    if not tensor.requires_grad or not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return tensor
    return _CutRerun.apply(torch.zeros((), requires_grad=True), tensor.detach(), look)


class _CutRerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, look: Any) -> torch.Tensor:
        ctx.look = look
        return tensor.data  # a new tensor on the same memory, and no view: code may still change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.look(gradients[0])
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
    """Compiled modules run as the Python that they were made from: a compiled graph would not call hooks inside it."""
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _losses_in(returned: Any) -> dict[str, torch.Tensor]:
    """What a step returned: a number, tensors, or something that has a loss."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(loss, torch.Tensor):
        returned = loss
    if isinstance(returned, float):
        returned = torch.tensor(returned)
    return {f"returned {i}": tensor for i, tensor in enumerate(tensors_in(returned))}


def _numbers(tree: Any) -> list[str]:
    """The plain values among a call's arguments, as text."""
    if isinstance(tree, (tuple, list)):
        return [text for x in tree for text in _numbers(x)]
    if isinstance(tree, dict):
        return [text for key, x in tree.items() for text in (str(key), *_numbers(x))]
    return [repr(tree)] if isinstance(tree, (int, float, str, complex)) else [type(tree).__name__]
