"""When does backward begin and end, what is its loss, and when does an optimizer step?

`torch.autograd`'s one entry to its engine is wrapped for the length of a run: there the losses are known, as the
tensors that backward starts from. Optimizers have hooks of their own for this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.autograd.graph
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.sites import Stop, locate


class Backward(NamedTuple):
    """One call of the engine. accumulate: it fills `.grad` (`backward()`);
    else it returns gradients (`autograd.grad`)."""

    roots: tuple[torch.Tensor, ...]
    seeds: tuple[torch.Tensor | None, ...]
    inputs: tuple[torch.Tensor, ...]
    retain: bool
    create: bool
    accumulate: bool
    place: Stop


class EngineWatch:
    """Tells of backward calls while attached. Calls made inside another backward (checkpointing), and
    those of a compiler that only traces, are not told. unseen:
    run backward without dispatch modes, where nobody looks at its ops.

    However many watch, the engine's entry is wrapped once, and put back when the last of them leaves.
    """

    _attached: ClassVar[list[EngineWatch]] = []
    _wrapped: ClassVar[list[tuple[Any, Any, Any]]] = []  # module, what stood there before, our wrapper

    def __init__(self, began: Callable[[Backward], None], ended: Callable[[Backward, Any], None], unseen: bool = False):
        self.began, self.ended, self.unseen = began, ended, unseen
        self.keep_graph = False  # what backward needs is to stay, so that it can be run once more

    def attach(self) -> None:
        self._attached.append(self)
        if self._wrapped:
            return
        original = torch.autograd.graph._engine_run_backward
        wrapper = _told(original, self._attached)
        modules: list[Any] = [torch.autograd.graph, torch.autograd]
        for module in modules:
            if module._engine_run_backward is original:
                self._wrapped.append((module, original, wrapper))
                module._engine_run_backward = wrapper

    def detach(self) -> None:
        if self in self._attached:
            self._attached.remove(self)
        while self._wrapped and not self._attached:
            module, original, wrapper = self._wrapped.pop()
            if module._engine_run_backward is wrapper:  # else somebody has wrapped ours, which now only passes on
                module._engine_run_backward = original


def _told(original: Callable, attached: list[EngineWatch]) -> Callable:
    """The engine's entry, with those told that are attached when it is called."""

    def watched(roots: Any, seeds: Any, retain: bool, create: bool, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not attached or torch._C._current_autograd_node() is not None or isinstance(roots[0], FakeTensor):
            return original(roots, seeds, retain, create, inputs, *args, **kwargs)
        accumulate = kwargs.get("accumulate_grad", args[1] if len(args) > 1 else False)
        call = Backward(tuple(roots), tuple(seeds), tuple(inputs), retain, create, accumulate, locate())
        watches = list(attached)
        for watch in watches:
            watch.began(call)
        unseen = any(watch.unseen for watch in watches)
        retain = retain or any(watch.keep_graph for watch in watches)
        with _disable_current_modes() if unseen else contextlib.nullcontext():
            result = original(roots, seeds, retain, create, inputs, *args, **kwargs)
        for watch in reversed(watches):
            watch.ended(call, result)
        return result

    return watched


class OptimizerWatch:
    """Tells of optimizer steps while attached: `before(optimizer, place)` and `after(optimizer)`."""

    def __init__(self, before: Callable[[Any, Stop], None], after: Callable[[Any], None]):
        self.before, self.after = before, after
        self._handles: list[Any] = []

    def attach(self) -> None:
        self._handles = [
            torch_optimizer.register_optimizer_step_pre_hook(
                lambda optimizer, args, kwargs: self.before(optimizer, locate())
            ),
            torch_optimizer.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.after(optimizer)),
        ]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
