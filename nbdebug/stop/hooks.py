"""Hooks on layers that stay out of copies, and what they are given, in the user's terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


class Hook:
    """A deepcopy or a pickle of the model has one that does nothing, and is loaded without nbdebug."""

    def __init__(self, call: Callable[..., None]):
        self.call = call

    def __call__(self, *given: Any) -> None:
        __tracebackhide__ = True
        if not torch.compiler.is_compiling():  # a compiler that reads this finds nothing to do
            self.call(*given)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def unreal(*values: Any) -> bool:
    """Whether a step is only thought through, on tensors without numbers."""
    return any(isinstance(value, FakeTensor) for value in values) or any(
        isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()
    )


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Look at tensors without a graph, and without dispatch modes that take every op for the model's."""
    modes = _disable_current_modes() if _get_current_dispatch_mode_stack() else contextlib.nullcontext()
    with torch.no_grad(), modes:
        yield


def one(values: Any) -> Any:
    """A tuple with one entry that is not None as that entry; all else as it is."""
    if type(values) is not tuple:
        return values
    there = [value for value in values if value is not None]
    return there[0] if len(there) == 1 else values
