"""A layer's forward is reached: before it, at its first line, at its return, or after it."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from nbdebug.stop.awaited import Awaited, await_frame, over
from nbdebug.stop.debuggers import way
from nbdebug.stop.frames import calling, own_code
from nbdebug.stop.hooks import Hook, one, unreal


class Forwards:
    """The hooks on forwards of a stop."""

    def __init__(self, stop: Any):
        self.stop = stop
        self._taken = False  # the only hit has come, and is on its way to its record
        self._told_once = False

    def attach(self, name: str, module: nn.Module) -> list[Any]:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.stop.border(self._before, name, module, args, kwargs, sys._getframe(2))

        def after(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            self.stop.border(self._after, name, module, args, kwargs, out, sys._getframe(2))

        return [
            module.register_forward_pre_hook(Hook(before), with_kwargs=True),
            module.register_forward_hook(Hook(after), with_kwargs=True),
        ]

    def _listens(self, args: tuple, kwargs: dict) -> bool:
        """Not to what a checkpoint computes again: this forward has been."""
        return self.stop.listens() and torch._C._current_autograd_node() is None and not unreal(*args, *kwargs.values())

    def _given(self, name: str, module: nn.Module, args: tuple, kwargs: dict, *out: Any) -> dict[str, Any]:
        made = {"out": one(out[0])} if out else {}
        return {"inp": one((*args, *kwargs.values())), **made, "module": module, "name": name, "step": self.stop.step}

    def _before(self, name: str, module: nn.Module, args: tuple, kwargs: dict, caller: FrameType) -> None:
        if self._taken or not self._listens(args, kwargs):
            return
        given, code = self._given(name, module, args, kwargs), own_code(module)
        sure = not self.stop.condition.late(code)
        if sure and not self.stop.holds(given):
            return
        recorded = sure and way() == "record"  # nobody looks on: what comes out is worth the wait
        if sure and code is None and not recorded:
            self._stop("before", given, calling(caller))
        elif code is not None or recorded:
            self._taken = recorded and self.stop.once
            awaited = Awaited(self, code, module, caller, sure=sure, **self._told(given, sure, recorded, caller))
            if not await_frame(awaited):
                self._told_of_profiler(code)
                if sure:
                    self._stop("before", given, calling(caller))

    def _told(self, given: dict[str, Any], sure: bool, recorded: bool, caller: FrameType) -> dict[str, Any]:
        """What is to be done when the frame of the forward begins, returns, or is left by an exception."""
        border = self.stop.border

        def entered(frame: FrameType) -> None:
            border(self._stop, "first line", given, frame)

        def returned(frame: FrameType, out: Any) -> None:
            border(self._out, "return", {**given, "out": one(out)}, sure, frame)

        def raised(frame: FrameType | None) -> None:
            border(self._stop, "raised", given, frame or calling(caller))

        if sure and not recorded:
            return {"entered": entered}
        return {"returned": returned, "raised": raised} if recorded else {"returned": returned}

    def _told_of_profiler(self, code: CodeType | None) -> None:
        if code is not None and not self._told_once:
            self._told_once = True
            print(
                f"nbdebug: another profiler is on, so {self.stop.question} stops at the line that calls the layer, "
                "not inside its forward, and a condition sees no locals of that. This is said once.",
                file=sys.stderr,
            )

    def _out(self, moment: str, given: dict[str, Any], sure: bool, frame: FrameType | None) -> None:
        own = frame if moment == "return" else None
        if self.stop.listens() and (sure or self.stop.holds(given, own)):
            self._stop(moment, given, frame)

    def _stop(self, moment: str, given: dict[str, Any], frame: FrameType | None) -> None:
        self.stop.stop(given["name"], moment, given["step"], given, frame)

    def _after(self, name: str, module: nn.Module, args: tuple, kwargs: dict, out: Any, caller: FrameType) -> None:
        """What has had a frame of its own has been seen to there; all else is here."""
        call = over(caller, self)
        if call is not None and call.frame is not None or not self._listens(args, kwargs):
            return
        if call is None and not self.stop.condition.late(own_code(module)):  # seen to before the forward
            return
        given = self._given(name, module, args, kwargs, out)
        self._out("after", given, call is not None and call.sure, calling(caller))
