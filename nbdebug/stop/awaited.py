"""Waits for the frame of a layer's own forward.

A profile function hears of every frame of its thread that begins or returns, and may look at its locals. It is set
when a layer is called and taken away when the call is over, also when the call ends in an exception or in Ctrl-C:
the frame that makes the call is waited for as well. A debugger's own trace function is a thing apart and stays.
"""

from __future__ import annotations

import dataclasses
import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


@dataclasses.dataclass(eq=False)
class Awaited:
    """A call of a layer, whose forward is to come. by: who waits for it. code: the forward's; None where it has none to
    stop in. caller: the frame that makes the call. entered(frame) is told when the forward begins; returned(frame,
    out) when it returns; raised(frame) when an exception leaves it, with the frame None where there was none. sure:
    the condition has been asked. frame: the forward's own, once it has been seen."""

    by: Any
    code: CodeType | None
    owner: Any
    caller: FrameType
    entered: Callable[[FrameType], None] | None = None
    returned: Callable[[FrameType, Any], None] | None = None
    raised: Callable[[FrameType | None], None] | None = None
    sure: bool = False
    frame: FrameType | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Awaited] = []


_here = _Thread()


def await_frame(call: Awaited) -> bool:
    """Wait for it from now on; False where another profiler has the place."""
    if sys.getprofile() not in (None, _heard):
        return False
    if sys.getprofile() is None:
        _here.calls.clear()  # whatever waits there was cut off together with its profile function
        sys.setprofile(_heard)
    _here.calls.append(call)
    return True


def over(caller: FrameType, by: Any) -> Awaited | None:
    """The call that this frame makes has returned: what was awaited of it, which now is not any more."""
    call = next((call for call in reversed(_here.calls) if call.caller is caller and call.by is by), None)
    if call is not None:
        _drop(call)
    return call


def _drop(call: Awaited) -> None:
    place = _here.calls.index(call)  # those above it are calls inside it, or wait for the same one
    _here.calls[place:] = [other for other in _here.calls[place + 1 :] if other.caller is call.caller]
    if not _here.calls and sys.getprofile() is _heard:
        sys.setprofile(None)


def _heard(frame: FrameType, event: str, argument: Any) -> None:
    if event not in ("call", "return"):
        return
    if not _here.calls:
        sys.setprofile(None)
        return
    caller = _here.calls[-1].caller
    try:
        for call in [call for call in _here.calls if call.caller is caller]:
            if event == "return":
                _ended(call, frame, argument)
            elif call.frame is None and frame.f_code is call.code and _belongs(frame, call.owner):
                _began(call, frame)
    except BaseException:  # it goes on to the user's code, and Python takes the profile function away
        _here.calls.clear()
        raise


def _ended(call: Awaited, frame: FrameType, argument: Any) -> None:
    if frame is call.caller:  # and it was not `over` before: an exception
        _drop(call)
        _raised(call)
    elif frame is call.frame:
        if _raising(frame, argument):
            _raised(call)
        elif call.returned is not None:
            call.returned(frame, argument)


def _raised(call: Awaited) -> None:
    told, call.raised = call.raised, None
    if told is not None:
        told(call.frame)


def _began(call: Awaited, frame: FrameType) -> None:
    call.frame = frame
    if call.entered is not None:
        _drop(call)
        call.entered(frame)


def _belongs(frame: FrameType, owner: Any) -> bool:
    """Another layer of the same type may be called first, by a forward pre-hook of the user's, say. A function that was
    put in the place of a forward takes no layer."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0], owner) if code.co_argcount else owner
    return first is owner or not isinstance(first, type(owner))


def _raising(frame: FrameType, argument: Any) -> bool:
    """An exception that leaves a frame looks like a return of None, but for the instruction that it stands at."""
    if argument is not None:
        return False
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
