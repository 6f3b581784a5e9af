"""When does a GradScaler take its scale out, and when does it leave a step out?

A step that is left out never reaches the optimizer, so that the optimizer's own hooks can't tell of it: two methods of
GradScaler are wrapped for the length of a watch. However many watch, they are wrapped once, and put back when the last
of them leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch


class Listener(Protocol):
    """What is told. Each: (scaler, optimizer)."""

    def unscaling(self, scaler: Any, optimizer: Any) -> None: ...
    def asked(self, scaler: Any, optimizer: Any) -> None: ...
    def answered(self, scaler: Any, optimizer: Any) -> None: ...


class ScalerWatch:
    """Tells of enabled scalers while attached. unscaling: `unscale_` begins, called by the user or by `step`; asked,
    answered: `step` begins and has ended; told: calls a method of the listener, so that its faults stay its own."""

    _attached: ClassVar[list[ScalerWatch]] = []
    _wrapped: ClassVar[dict[str, tuple[Any, Any]]] = {}  # method: what stood there before, our wrapper

    def __init__(self, listener: Listener, told: Callable[..., Any]):
        self.listener, self.told = listener, told

    def attach(self) -> None:
        self._attached.append(self)
        if not self._wrapped:
            kind = torch.amp.GradScaler
            for name, wrap in (("unscale_", _unscale), ("step", _step)):
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

    def tell(self, what: str, scaler: Any, optimizer: Any) -> None:
        if scaler.is_enabled():
            self.told(getattr(self.listener, what), scaler, optimizer)


def _unscale(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def unscale_(self: Any, optimizer: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.tell("unscaling", self, optimizer)
        return before(self, optimizer)

    return unscale_


def _step(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.tell("asked", self, optimizer)
        result = before(self, optimizer, *args, **kwargs)
        for watch in list(attached):
            watch.tell("answered", self, optimizer)
        return result

    return step
