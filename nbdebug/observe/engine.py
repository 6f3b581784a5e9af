"""When does backward begin and end, what is its loss, and when does an optimizer step?

`torch.autograd`'s one entry to its engine is wrapped for the length of a run: there the losses are known, as the
tensors that backward starts from. Optimizers have hooks of their own for this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.autograd.graph
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
    """Tells of backward calls while attached. Calls made inside another backward (checkpointing) are not told. unseen:
    run backward without dispatch modes, where nobody looks at its ops."""

    def __init__(self, began: Callable[[Backward], None], ended: Callable[[Backward, Any], None], unseen: bool = False):
        self.began, self.ended, self.unseen = began, ended, unseen
        self._modules: list[Any] = []

    def attach(self) -> None:
        original = torch.autograd.graph._engine_run_backward

        def watched(roots: Any, seeds: Any, retain: bool, create: bool, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_autograd_node() is not None:
                return original(roots, seeds, retain, create, inputs, *args, **kwargs)
            accumulate = kwargs.get("accumulate_grad", args[1] if len(args) > 1 else False)
            call = Backward(tuple(roots), tuple(seeds), tuple(inputs), retain, create, accumulate, locate())
            self.began(call)
            with _disable_current_modes() if self.unseen else contextlib.nullcontext():
                result = original(roots, seeds, retain, create, inputs, *args, **kwargs)
            self.ended(call, result)
            return result

        self._original = original
        self._modules = [m for m in (torch.autograd.graph, torch.autograd) if m._engine_run_backward is original]
        for module in self._modules:
            module._engine_run_backward = watched

    def detach(self) -> None:
        while self._modules:
            self._modules.pop()._engine_run_backward = self._original


class OptimizerWatch:
    """Tells of optimizer steps while attached: `before(optimizer, place)` and `after(optimizer)`."""

    def __init__(self, before: Callable[[Any, Stop], None], after: Callable[[Any], None]):
        self.before, self.after = before, after
        self._handles: list[Any] = []

    def attach(self) -> None:
        self._handles = [
            torch_optimizer.register_optimizer_step_pre_hook(
                lambda optimizer, args, kwargs: self.before(optimizer, locate())),
            torch_optimizer.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.after(optimizer))]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
