"""The holder of memory that no name leads to: from a tensor that should be gone, back over those who refer to it."""

from __future__ import annotations

import gc
import os
import types
from collections.abc import Iterable
from typing import Any

import torch

import nbdebug

_OURS = os.path.dirname(nbdebug.__file__) + os.sep
DEEP = 7
MOST = 400
"""Referrers followed on one level; a thing with more than that is held by everybody."""


def tensors_on(keys: set[int]) -> list[torch.Tensor]:
    """Live tensors on these storages, by the storages' `_cdata`."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            try:
                if thing.untyped_storage()._cdata in keys:
                    found.append(thing)
            except (AttributeError, NotImplementedError, RuntimeError, ValueError):
                continue
    return found


def holder_of(tensor: Any, own: Iterable[Any]) -> str:
    """What holds a tensor, told as well as can be: "a variable `x` of `load` (data.py)", "a generator …"; "" where
    nothing is found."""
    ours = {id(thing) for thing in own}
    level = [tensor]
    seen = {id(tensor), id(level)}
    for _ in range(DEEP):
        above = gc.get_referrers(*level)
        seen |= {id(above), id(level)}
        following = []
        for thing in above[:MOST]:
            if id(thing) in seen or id(thing) in ours:
                continue
            seen.add(id(thing))
            said = _said(thing, level)
            if said:
                return said
            following.append(thing)
        if not following:
            return ""
        level = following
    return ""


def _said(thing: Any, level: list[Any]) -> str:
    kind = type(thing)
    if kind is types.FrameType:
        if thing.f_globals.get("__name__", "").startswith("nbdebug."):
            return ""
        named = [n for n, v in thing.f_locals.items() if any(v is held for held in level)]
        return f"{named[0]} in {thing.f_code.co_name}" if named else thing.f_code.co_name
    if kind is dict and "__name__" in thing and "__builtins__" in thing:
        named = [n for n, v in thing.items() if any(v is held for held in level)]
        module = thing["__name__"]
        return "" if not named or str(module).startswith("nbdebug.") else f"{module}.{named[0]}"
    if issubclass(kind, types.GeneratorType) and not str(thing.gi_code.co_filename).startswith(_OURS):
        return str(thing.gi_code.co_name)
    return ""
