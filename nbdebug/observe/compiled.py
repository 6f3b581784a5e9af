"""Calls of compiled models: neither `torch.compile(model)` nor `model.compile()` runs hooks that a model was given.

Compiled code is made from what hooks do, and ours have nothing to do there. So the two doors into it are watched
instead, from outside: the call of the wrapper that `torch.compile` gives, and what `model.compile()` puts into the
model. Both are as before once the last watch has left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

Tell = Callable[..., None]


class CompiledWatch:
    """While attached: `before(name, args, kwargs)` and `after(name, args, kwargs, output)` of each call of one of these
    modules that goes into compiled code; output is None where it raised."""

    _attached: ClassVar[list[CompiledWatch]] = []
    _original: ClassVar[list[Any]] = []

    def __init__(self, modules: Mapping[str, nn.Module], before: Tell, after: Tell):
        self.modules, self.before, self.after = dict(modules), before, after
        self._names = {id(module): name for name, module in modules.items()}
        self._inside: list[tuple[nn.Module, Any]] = []  # modules that hold a door of ours, and what it was before

    def attach(self) -> None:
        self._attached.append(self)
        self.refresh()

    def refresh(self) -> None:
        """See to what has been compiled since."""
        if "torch._dynamo" not in sys.modules:
            return
        from torch._dynamo import OptimizedModule

        if not self._original:
            self._original.append(OptimizedModule.__call__)
            OptimizedModule.__call__ = _door(OptimizedModule.__call__, self._attached)  # type: ignore[method-assign]
        for name, module in self.modules.items():
            own = module._compiled_call_impl
            if own is not None and not isinstance(own, _Door):
                self._inside.append((module, own))
                module._compiled_call_impl = _Door(own, self, name)

    def detach(self) -> None:
        if self in self._attached:
            self._attached.remove(self)
        while self._inside:
            module, own = self._inside.pop()
            if isinstance(module._compiled_call_impl, _Door):
                module._compiled_call_impl = own
        if self._original and not self._attached:
            from torch._dynamo import OptimizedModule

            OptimizedModule.__call__ = self._original.pop()  # type: ignore[method-assign]

    def name_of(self, wrapper: nn.Module) -> str | None:
        """The name of the module that a wrapper compiles; None for one that is watched itself, by its own hooks."""
        return None if id(wrapper) in self._names else self._names.get(id(wrapper._modules.get("_orig_mod")))


class _Door:
    """What stands in a module in place of its compiled code, and passes on to it."""

    def __init__(self, own: Any, watch: CompiledWatch, name: str):
        self.own, self.watch, self.name = own, watch, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        return _passing([(self.watch, self.name)], self.own, args, kwargs, args)


def _door(original: Callable, attached: Iterable[CompiledWatch]) -> Callable:
    """A wrapper's call, with those told that are attached when it comes."""

    def watched(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            return original(wrapper, *args, **kwargs)
        names = [(watch, name) for watch in attached if (name := watch.name_of(wrapper)) is not None]
        return _passing(names, original, (wrapper, *args), kwargs, args)

    return watched


def _passing(told: list[tuple[CompiledWatch, str]], original: Callable, given: tuple, kwargs: dict, args: tuple) -> Any:
    __tracebackhide__ = True
    for watch, name in told:
        watch.before(name, args, kwargs)
    output = None
    try:
        output = original(*given, **kwargs)
        return output
    finally:
        for watch, name in reversed(told):
            watch.after(name, args, kwargs, output)


PASSING = _passing.__code__
"""The frame of a call on its way through one of these doors; its local `told` names the module."""
