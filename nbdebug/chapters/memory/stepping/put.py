"""The user's line that puts something where it stays: one more step runs, traced line by line, and after each line the
holder is looked at. Only lines of the user's own are traced."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

from nbdebug.chapters.memory.stepping.source import Taker, never_runs
from nbdebug.observe import sites
from nbdebug.observe.sites import Site

_MODULE = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "module.py")


class Put(NamedTuple):
    """The line, and whether it runs inside a hook, on which module."""

    site: Site
    hook: bool = False
    module: Any = None


class Tracer:
    """Calls a step with every line of the user's own followed. watches: functions that give a comparable state; takers:
    statements that take things out, of which `dead` are those that a flag keeps from running."""

    def __init__(self, watches: list[Callable[[], Any]], takers: Iterable[Taker] = ()):
        self.watches, self.takers = watches, list(takers)
        self.dead: set[Taker] = set()
        self.found: list[Put | None] = [None] * len(watches)
        self._before = [watch() for watch in watches]
        self._last: FrameType | None = None
        self._line = 0

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs the step, not traced where a debugger or a measure of coverage traces already."""
        if sys.gettrace() is not None:
            return step()
        sys.settrace(self._called)
        try:
            return step()
        finally:
            sys.settrace(None)
            self._last = None

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if sites.kind_of(frame.f_code) != sites.USER:
            return None
        self._look()
        return self._traced

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._look()
        if event == "return":
            self.dead |= {
                t
                for t in self.takers
                if t.function == frame.f_code.co_name and t.file == frame.f_code.co_filename and never_runs(t, frame)
            }
            self._set_last(_users_frame(frame.f_back))
        else:
            self._set_last(frame)
        return self._traced

    def _set_last(self, frame: FrameType | None) -> None:
        self._last, self._line = frame, frame.f_lineno if frame is not None else 0

    def _look(self) -> None:
        for number, watch in enumerate(self.watches):
            now = watch()
            if now != self._before[number]:
                self._before[number] = now
                if self.found[number] is None and self._last is not None:
                    self.found[number] = self._put(self._last)

    def _put(self, frame: FrameType) -> Put:
        site = Site(frame.f_code.co_filename, self._line, frame.f_code.co_name)
        inner: FrameType | None = frame
        while inner is not None and inner.f_back is not None:
            outer = inner.f_back
            if outer.f_code.co_name == "_engine_run_backward" and sites.kind_of(inner.f_code) == sites.USER:
                return Put(site, True)  # a tensor's hook is called by the engine itself
            if (
                outer.f_code.co_filename == _MODULE
                and inner.f_code.co_name != "forward"
                and sites.kind_of(inner.f_code) == sites.USER
            ):
                return Put(site, True, outer.f_locals.get("self"))
            inner = outer
        return Put(site)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and sites.kind_of(frame.f_code) != sites.USER:
        frame = frame.f_back
    return frame
