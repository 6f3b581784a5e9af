"""The frame to stop in, and the names that it is lent while it stands still."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from nbdebug.observe.sites import LIBRARY, USER, cell_name, kind_of

_NO_FRAME = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""The call of such a function returns before its body runs."""


def own_code(module: nn.Module) -> CodeType | None:
    """The code of the layer's own forward, below its decorators; None for a layer of torch's, whose forward tells
    nothing that the call does not, and where there is no Python code to stop in."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    forward: Any = module.forward
    while isinstance(forward, functools.partial) and not hasattr(forward, "__wrapped__"):
        forward = forward.func
    forward = inspect.unwrap(forward)
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if not isinstance(code, CodeType) or code.co_flags & _NO_FRAME:
        return None
    return code if kind_of(code) in (USER, LIBRARY) else None


def calling(frame: FrameType | None) -> FrameType | None:
    """Outwards from a hook, the first frame that is neither torch's nor nbdebug's nor Python's own."""
    while frame is not None and kind_of(frame.f_code) not in (USER, LIBRARY):
        frame = frame.f_back
    return frame


def calling_backward(frame: FrameType) -> FrameType | None:
    """The frame that called backward. On a GPU the engine runs hooks in a thread of its own, above which there is
    nothing: then the thread that waits in the engine is looked for."""
    found = calling(frame)
    if found is not None:
        return found
    waiting = (calling(_in_engine(top)) for top in sys._current_frames().values())
    return next((frame for frame in waiting if frame is not None), None)


def main_waits() -> bool:
    """Whether the main thread waits for backward to come to its end."""
    return _in_engine(sys._current_frames().get(threading.main_thread().ident or 0)) is not None


def _in_engine(at: FrameType | None) -> FrameType | None:
    while at is not None and at.f_code.co_name != "_engine_run_backward":
        at = at.f_back
    return at


def place(frame: FrameType | None) -> str:
    """ "In [7], line 4", "train.py, line 31"; "" where there is no frame."""
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    name = cell_name(file) or file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}, line {frame.f_lineno}"


def lend(frame: FrameType, given: Mapping[str, Any]) -> dict[str, str]:
    """Add these to the frame's locals. Each name → the one that it goes by there: `layer_out` where the code has an
    `out` of its own, which stays what it is, unless that is the same thing."""
    code, seen = frame.f_code, frame.f_locals
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if not code.co_flags & inspect.CO_OPTIMIZED:  # not of a function: these are the user's variables
        own.update(seen)
    names = {}
    for name, value in given.items():
        there = name
        while there in own and seen.get(there) is not value:
            there = f"layer_{there}"
        names[name] = there
        if there not in own:
            seen[there] = value
    return names


def take_back(frame: FrameType, names: Mapping[str, str], before: frozenset[str]) -> None:
    """Remove what was lent. before: the names that there were. Needed where the locals are the user's variables; those
    of a function end with its call."""
    seen = frame.f_locals
    for there in set(names.values()) - before:
        try:
            seen.pop(there, None)
        except (AttributeError, ValueError, TypeError):  # Python 3.13 lets a function's frame forget no name
            seen[there] = None
