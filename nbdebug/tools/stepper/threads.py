"""Two threads that take turns: the step's and the caller's, who continues it.

caller: go()      ──▶ step runs ──▶ step: wait()  ──▶ caller's turn again
caller: abandon() ──▶ wait() raises Abandoned, and so does every later one, until the step's thread has ended
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

import nbdebug
from nbdebug.observe.snapshot import random_sources

TIMEOUT = 5.0
"""Seconds that a step is given to end by itself; then it is interrupted wherever it is, and given as long again."""
_NOT_THE_USERS = tuple(os.path.dirname(module.__file__ or "?") + os.sep for module in (torch, nbdebug)) + (
    contextlib.__file__,
    threading.__file__,
)


class Abandoned(BaseException):
    """Unwinds a step that nobody wants any more. No Exception: code that handles errors is to let it pass."""


class ThreadHandoff:
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
            self.thread.join(TIMEOUT)  # it has only its own end left to do

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
                _unwind_at_next_line(sys._getframe(1))
            raise Abandoned

    def abandon(self, patience: float | None = None) -> bool:
        """End the step's thread; True when it has ended. From within the step itself it is only asked to end."""
        with self._changed:
            self.abandoned = self._steps_turn = True
            self._changed.notify_all()
        patience = TIMEOUT if patience is None else patience
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


def _unwind_at_next_line(frame: FrameType | None) -> None:
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


KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
_saved: Any = torch._C._autograd


class CallContext:
    """The state of the thread that makes this; `resume` gives it to another thread, which it is left to."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.forward_grad, self.view_replay = torch._C._is_fwd_grad_enabled(), torch._C._is_view_replay_enabled()
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()]
        self.cache = torch.is_autocast_cache_enabled()
        self.function_modes = _get_current_function_mode_stack()
        self.dispatch_modes = list(_get_current_dispatch_mode_stack())
        self.device_context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        self.saved_hooks = _saved_tensor_hooks()
        self.devices = [(module, module.current_device(), _streams(module)) for module in _accelerators()]
        self.threads = torch.get_num_threads()

    @contextlib.contextmanager
    def resume(self) -> Any:
        """In a thread that ends afterwards: what ends with it is not taken back."""
        torch.set_num_threads(self.threads)
        for module, device, streams in self.devices:
            module.set_device(device)
            for stream in streams:
                module.set_stream(stream)
            module.set_device(device)  # setting a stream makes its device the current one
        torch.set_autocast_cache_enabled(self.cache)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for hooks in self.saved_hooks:
            _saved._push_saved_tensors_default_hooks(*hooks)
        torch.autocast_increment_nesting()  # weights that autocast has cast stay cast until the step is over
        try:
            with torch.inference_mode(self.inference):  # sets all of autograd's switches, so the others come after it
                # Backward runs in this thread then, also a GPU's: a layer can wait in it without keeping the device's
                # own autograd thread, which the caller may need for a backward of theirs.
                torch._C._set_multithreading_enabled(False)
                torch._C._set_view_replay_enabled(self.view_replay)
                torch._C._set_fwd_grad_enabled(self.forward_grad)
                torch._C._set_grad_enabled(self.grad)
                self._modes()
                yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def _modes(self) -> None:
        """Last: they would see everything that is done before."""
        if self.device_context is not None:
            torch._GLOBAL_DEVICE_CONTEXT.device_context = self.device_context
        for mode in self.dispatch_modes:
            _push_dispatch_mode(mode)
        for mode in self.function_modes:
            _push_function_mode(mode)


class ProcessState:
    """What the whole process has one of, and two owners who take turns. Each continues where it stopped."""

    def __init__(self) -> None:
        self._others = self._now()

    def change_over(self) -> None:
        """Keep what is the one's, put what is the other's in force."""
        mine, others = self._now(), self._others
        for name in mine.keys() & others.keys():  # a device that has been woken since has no other state yet
            others[name][1](others[name][2])
        self._others = mine

    def put_back(self) -> None:
        """What was in force when this was made."""
        for _, write, state in self._others.values():
            write(state)

    @staticmethod
    def _now() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
        return {name: (read, write, read()) for name, read, write in (*_settings(), *random_sources())}


def _settings() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Switches of the process: name, how to read, how to set."""
    yield "default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield (
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.set_anomaly_enabled(*state),
    )
    yield ("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)
    for name in ("enabled", "benchmark", "deterministic"):
        yield (
            f"cudnn.{name}",
            functools.partial(getattr, torch.backends.cudnn, name),
            functools.partial(setattr, torch.backends.cudnn, name),
        )
    for name in ("flash", "mem_efficient", "math", "cudnn"):  # what torch.nn.attention.sdpa_kernel sets
        yield (
            f"attention by {name}",
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )


def _kinds() -> list[str]:
    """The kinds of device that autocast knows."""
    kinds = []
    for kind in KINDS:
        with contextlib.suppress(RuntimeError):
            torch.is_autocast_enabled(kind)
            kinds.append(kind)
    return kinds


def _accelerators() -> list[Any]:
    """Those that have been used, and have streams."""
    return [module for kind in ("cuda", "xpu") if (module := getattr(torch, kind)).is_initialized()]


def _streams(module: Any) -> list[Any]:
    return [module.current_stream(device) for device in range(module.device_count())]


def _saved_tensor_hooks() -> list[tuple[Any, Any]]:
    """The default hooks on saved tensors, outermost first. They can be read one at a time only: taken off, put back.
    torch 2.6 can't read them: the step then runs without."""
    pairs: list[tuple[Any, Any]] = []
    if not hasattr(_saved, "_top_saved_tensors_default_hooks"):
        return pairs
    while (top := _saved._top_saved_tensors_default_hooks(False)) is not None:
        pairs.insert(0, top)
        _saved._pop_saved_tensors_default_hooks()
    for hooks in pairs:
        _saved._push_saved_tensors_default_hooks(*hooks)
    return pairs
