"""Two threads that take turns: the step's, and that of whoever asks it to go on.

caller: go()      ──▶ step runs ──▶ step: wait()  ──▶ caller's turn again
caller: abandon() ──▶ wait() raises Abandoned, and so does every later one, until the step's thread has ended
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import nbdebug

PATIENCE = 5.0
"""Seconds that a step is given to end by itself; then it is interrupted wherever it is, and given as long again."""
_NOT_THE_USERS = tuple(os.path.dirname(module.__file__ or "?") + os.sep for module in (torch, nbdebug)) + (
    contextlib.__file__,
    threading.__file__,
)


class Abandoned(BaseException):
    """Unwinds a step that nobody wants any more. No Exception: code that handles errors is to let it pass."""


class Turns:
    """Whose turn it is. run: what the step's thread does; it starts with the first `go`."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._changed = threading.Condition()
        self._steps_turn, self._ended, self.abandoned, self._refused = False, False, False, 0
        self.thread = threading.Thread(target=self._whole, args=(run,), name=name, daemon=True)

    def _whole(self, run: Callable[[], None]) -> None:
        try:
            run()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    @property
    def over(self) -> bool:
        """The step's thread has ended, or never begun."""
        return self._ended or self.thread.ident is None

    @property
    def running(self) -> bool:
        return self._steps_turn and not self.over

    @property
    def inside(self) -> bool:
        """Whether this is the step's thread."""
        return threading.get_ident() == self.thread.ident

    def go(self) -> None:
        """Let the step run until it waits or ends. Ctrl-C here leaves it running."""
        with self._changed:
            self._steps_turn = True
            self._changed.notify_all()
        if self.thread.ident is None:
            self.thread.start()
        self.until_waiting()

    def until_waiting(self) -> None:
        """Return when the step waits or has ended."""
        with self._changed:
            while self.running:
                self._changed.wait(0.5)  # now and then, so that Ctrl-C is heard everywhere
        if self.over and not self.inside and self.thread.ident is not None:
            self.thread.join(PATIENCE)  # it has only its own end left to do

    def wait(self) -> None:
        """For the step: hand the turn over, return when it comes back. Raises Abandoned."""
        with self._changed:
            if not self.abandoned:
                self._steps_turn = False
                self._changed.notify_all()
            while not self._steps_turn and not self.abandoned:
                self._changed.wait()
        self.check()

    def check(self) -> None:
        """For the step, at every layer. Raises Abandoned when it is to end."""
        if self.abandoned:
            self._refused += 1
            if self._refused > 1:  # the user's code has caught it
                _leave_soon(sys._getframe(1))
            raise Abandoned

    def abandon(self, patience: float | None = None) -> bool:
        """End the step's thread; True when it has ended. From within the step itself it is only told to end."""
        with self._changed:
            self.abandoned = self._steps_turn = True
            self._changed.notify_all()
        patience = PATIENCE if patience is None else patience
        if self.thread.ident is None or self.inside:
            return self.over
        if not self._ended_within(patience):
            _raise_in(self.thread)  # in Python code that calls no layer
            return self._ended_within(patience)
        return True

    def _ended_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.thread.is_alive() and time.monotonic() < end:
            self.thread.join(0.05)  # short: Ctrl-C is heard between
        return not self.thread.is_alive()

    def place(self) -> str:
        """Where the step's thread is, for people: "model.py, line 3", or ""."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}" if frame else ""


def _leave_soon(frame: FrameType | None) -> None:
    """Leave every function of the user's that is running, at its next line: a loop that catches everything and tries
    again would keep the thread for ever. Only those functions: what torch has to put back, it still puts back."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            raise Abandoned  # Python traces no more from here on
        return trace

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "return":  # now the caller's lines
            sys.settrace(_silent)

    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame.f_trace = trace
        frame = frame.f_back
    sys.setprofile(profile)
    sys.settrace(_silent)  # a frame is traced only while its thread traces at all


def _silent(frame: FrameType, event: str, arg: Any) -> None:
    """No function that is called from now on is traced."""


def _raise_in(thread: threading.Thread) -> None:
    """Raise Abandoned in a thread, at its next bytecode."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
