"""How much memory Python objects take that are no tensors and no arrays: strings, numbers, containers of them."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

MOST = 20_000
_SHARED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    torch.Tensor,
    torch.nn.Module,
    torch.dtype,
    torch.device,
    BaseException,
)


def plain_bytes(items: Iterable[Any], known: Iterable[Any] = ()) -> int:
    """The sizes of all plain objects in `items` that are not in `known`; of more than MOST, those met first."""
    seen: set[int] = set()
    _sum(list(known), seen)
    return _sum(list(items), seen)


def _sum(todo: list[Any], seen: set[int]) -> int:
    total = count = 0
    while todo and count < MOST:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, _SHARED) or thing is None or thing is True or thing is False:
            continue
        seen.add(id(thing))
        count += 1
        total += object.__sizeof__(thing) if type(thing).__module__ != "builtins" else sys.getsizeof(thing)
        todo += gc.get_referents(thing)
    return total
