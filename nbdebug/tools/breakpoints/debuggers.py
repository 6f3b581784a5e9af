"""How to stop: in debugpy, in ipdb, or not at all.

    debugpy   where a client is attached: JupyterLab's debugger is on in this notebook, or VS Code debugs it
    ipdb      where somebody can type: the notebook's front end answers input requests, or stdin is a terminal
    record    neither: nbconvert, a test run, a job of a cluster

Both debuggers can stop "at the first line" of a frame that is about to run, and "here", in a frame that stands at the
end of a call or is in the middle of one. Here is the harder one: Python tells a debugger of no line at that moment, so
it is asked to begin by itself. `c` and similar commands continue as without a stop; `q` ends the training with a
KeyboardInterrupt, which no `except Exception` of a training loop swallows.
"""

from __future__ import annotations

import bdb
import sys
import threading
from types import FrameType
from typing import Any

_SET_BREAK = 111  # what pydevd calls a stop at a breakpoint (CMD_SET_BREAK)
_OURS = ("torch", "nbdebug")
"""Packages that `n`, `s` and `u` of ipdb pass over, so that the next line is one of the user's."""


class TrainingLeft(KeyboardInterrupt):
    """The user typed `q` at a stop: the step was left there and then, and the training with it."""

    def __init__(self) -> None:
        super().__init__("Left at a stop, with q: this step was not finished.")

    def _render_traceback_(self) -> list[str]:
        """IPython's traceback: the user was just there, so a sentence is enough. %tb shows no more."""
        return [f"KeyboardInterrupt: {self}"]


def mode(blocked: bool = False) -> str:
    """ "debugpy", "ipdb" or "record". blocked: the main thread waits for this one, so that this one may ask."""
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None and debugpy.is_client_connected():
        return "debugpy"
    if threading.current_thread() is not threading.main_thread() and not blocked:
        return "record"  # two threads would ask at the same prompt
    return "ipdb" if _can_ask() else "record"


def _can_ask() -> bool:
    kernel = getattr(running_shell(), "kernel", None)
    if kernel is not None:
        return bool(getattr(kernel, "_allow_stdin", False))
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # it is closed
        return False


def running_shell() -> Any:
    """The IPython shell, if one runs; IPython is never imported for it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def at_prompt() -> bool:
    """Whether this thread waits at a stop already: code that is typed there stops nowhere else."""
    info = getattr(threading.current_thread(), "additional_info", None)  # pydevd's
    return _Debugger.asking == threading.get_ident() or bool(getattr(info, "is_in_wait_loop", False))


# -- debugpy ----------------------------------------------------------------------------------------------------------


def debugpy_at_first_line(frame: FrameType) -> None:
    """The client sees the thread stop at the next line of this frame."""
    pydevd: Any = sys.modules["pydevd"]  # debugpy brings it along, under this name
    pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)


def debugpy_at_end(frame: FrameType, then: FrameType | None) -> None:
    """The client sees this frame on top of the stack, which is about to return. Called from a profile function. then:
    the frame that a step leads to. Returns when the client continues the thread."""
    _suspend(frame)
    info = getattr(threading.current_thread(), "additional_info", None)
    stepping = getattr(info, "pydev_step_cmd", -1) != -1
    if stepping and then is not None:  # to no line of this frame: it was the last
        debugpy_at_first_line(then)


def debugpy_here(frame: FrameType) -> None:
    """The same for a frame that is in the middle of a line, called from anywhere. What the client asks for runs in this
    thread and must not be traced: a profile function is where Python traces nothing."""
    before = sys.getprofile()

    def heard(frame_: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(before)
        _suspend(frame)

    sys.setprofile(heard)
    _nothing()


def _suspend(frame: FrameType) -> None:
    pydevd: Any = sys.modules["pydevd"]
    thread = threading.current_thread()
    pydevd.settrace(suspend=False, trace_only_current_thread=True, patch_multiprocessing=False)
    database = pydevd.get_global_debugger()
    database.set_suspend(thread, _SET_BREAK)
    database.do_wait_suspend(thread, frame, "line", None)


def _nothing() -> None:
    """A call for a profile function to hear of."""


# -- ipdb -------------------------------------------------------------------------------------------------------------


def ipdb_at_first_line(frame: FrameType, header: str) -> None:
    """A prompt opens at the next line of this frame."""
    debugger = _debugger()
    debugger.message(header)
    debugger.set_trace(frame)


def ipdb_here(frame: FrameType, header: str, ends: bool = False) -> None:
    """A prompt opens now, in this frame. ends: it is about to return. Raises Left when it is left with `q`."""
    debugger = _debugger()
    debugger.message(header)
    debugger.reset()
    outermost = frame
    while outermost.f_back is not None:
        outermost = outermost.f_back
    debugger.botframe = outermost
    debugger.set_step()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise TrainingLeft
    debugger.go_on(frame, ends)


class _Debugger:
    """What is added to the shell's own debugger class. asking: the thread that is at a prompt; before: the trace
    function that was there."""

    asking: int | None = None
    before: Any = None

    def interaction(self, *args: Any) -> None:
        _Debugger.asking = threading.get_ident()
        try:
            super().interaction(*args)  # type: ignore[misc]
        finally:
            _Debugger.asking = None

    def stop_here(self, frame: FrameType) -> bool:
        """IPython's own says so for each frame that it skips."""
        skipped = frame.f_globals.get("__name__", "").split(".")[0] in _OURS
        return not skipped and super().stop_here(frame)  # type: ignore[misc]

    def trace_dispatch(self, frame: FrameType, event: str, argument: Any) -> Any:
        try:
            return super().trace_dispatch(frame, event, argument)  # type: ignore[misc]
        except bdb.BdbQuit:
            raise TrainingLeft from None

    def set_continue(self) -> None:
        super().set_continue()  # type: ignore[misc]
        if sys.gettrace() is None and self.before is not None:
            sys.settrace(self.before)

    def go_on(self, frame: FrameType, ends: bool) -> None:
        """After a prompt that no trace function has opened: trace lines if it is to open again."""
        debugger: Any = self
        if debugger.stoplineno == -1 and not debugger.breaks:  # c
            return
        if ends and (debugger.stopframe is frame or debugger.returnframe is frame):
            debugger.set_step()  # n, r: this frame gets no more events
        at: FrameType | None = frame
        while at is not None:
            at.f_trace = debugger.trace_dispatch
            at = at.f_back
        sys.settrace(debugger.trace_dispatch)


def _debugger() -> Any:
    """The debugger of the running shell; without one ipdb's, whose shell must not stay in the place of __main__."""
    shell, main = running_shell(), sys.modules.get("__main__")
    own = getattr(shell, "debugger_cls", None)
    if own is None:
        from ipdb.__main__ import _get_debugger_cls  # as ipdb itself finds it: with the user's IPython configuration

        own = _get_debugger_cls()
    kind: Any = type("Debugger", (_Debugger, own), {"before": sys.gettrace()})
    try:
        debugger = kind(skip=[f"{package}*" for package in _OURS])
    except TypeError:
        debugger = kind()
    if main is not None and shell is None:
        sys.modules["__main__"] = main
    return debugger
