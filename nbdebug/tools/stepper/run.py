"""The step in its own thread, which takes turns with the caller's, who continues it: what happens at each layer, and
what is put back at the end.

caller: go()      ──▶ step runs ──▶ step: wait()  ──▶ caller's turn again
caller: abandon() ──▶ wait() raises Abandoned, and so does every later one, until the step's thread has ended
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import fnmatch
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

import nbdebug
from nbdebug.observe.backward import Backward, EngineWatch
from nbdebug.observe.rerun import map_tensors, uncompiled
from nbdebug.observe.snapshot import Snapshot, random_sources
from nbdebug.observe.tensors import loss_in, output_tensors
from nbdebug.report import Finding
from nbdebug.tools.stepper import events as numbers
from nbdebug.tools.stepper.events import (
    AFTER,
    BACKWARD,
    BACKWARD_DONE,
    BEFORE,
    LOSS,
    LayerCall,
    LayerPlace,
    StepEvent,
    StepStop,
)
from nbdebug.tools.stepper.hooks import Layers, Named, NodeHooks

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


Goal = Callable[[StepEvent], bool]


def into(event: StepEvent) -> bool:
    """The very next thing that happens."""
    return True


def never(event: StepEvent) -> bool:
    """On to the end."""
    return False


def non_finite(event: StepEvent) -> bool:
    """What makes something non-finite of finite values."""
    return event.culprit


def end_of_layer(here: LayerPlace) -> Goal:
    """The end of this layer; from there, of the next one beside it or around it. Where backward begins, too."""
    return _left(here, here.depth)


def end_of_parent(here: LayerPlace) -> Goal:
    """The end of the layer around this one."""
    return _left(here, max(0, here.depth - 1))


def _left(here: LayerPlace, depth: int) -> Goal:
    forward = not StepEvent(here).backward
    return lambda event: event.leaving and event.place.depth <= depth or forward and event.backward


def start_of(pattern: str) -> Goal:
    """Where a layer begins whose name or type the pattern fits, or its backward; "loss": at the loss."""
    return lambda event: (
        event.place.phase in (BEFORE, BACKWARD)
        and matches(pattern, event.place.name, event.place.module_type)
        or event.place.phase == LOSS
        and pattern == "loss"
    )


def matches(pattern: str, name: str, kind: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(kind, pattern)


def check(pattern: str, types: Mapping[str, str]) -> None:
    """types: every layer's name and type. Raises ValueError where nothing fits."""
    if not isinstance(pattern, str) or not pattern.strip():
        raise ValueError(f'run_to takes the name or type of a layer, or a pattern such as "blocks.*"; got {pattern!r}')
    if pattern != "loss" and not any(matches(pattern, name, kind) for name, kind in types.items()):
        near = [name for name in types if name and pattern.strip("*") in name] or [name for name in types if name]
        more = f" and {len(near) - 6} more" if len(near) > 6 else ""
        raise ValueError(f"No layer has the name or the type {pattern!r}. There are {', '.join(near[:6])}{more}")


_OURS = os.path.dirname(nbdebug.__file__) + os.sep


class StepRun:
    """step: computes the loss, or whatever the model gives. layers: whose calls are followed. before: what is put back
    at the end, and always when the step is abandoned; restore: also when it is finished.

    stop: where it waits, None while it does not; last: the stop before; result, error: what came of it; raised: where
    the error was; explained: its cause, once it was requested; fault: why nbdebug no longer stops, or "".
    """

    def __init__(
        self,
        step: Callable[[], Any],
        layers: Layers,
        before: Snapshot,
        caller: CallContext,
        *,
        backward: bool,
        restore: bool,
    ):
        self.step, self.layers, self.before, self.backward, self.restore = step, layers, before, backward, restore
        self.goal: Goal = into
        self.stop: StepStop | None = None
        self.last: LayerPlace | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.raised: LayerPlace | None = None
        self.explained: tuple[Finding, ...] | None = None
        self.fault, self._went_back = "", False
        self._caller, self._shared, self._callers_turn = caller, ProcessState(), True
        self._gradients: list[NodeHooks] = []
        self._open: list[LayerCall] = []  # whose backward has begun
        self._sound = self._spoilable = True  # until now; at the beginning of a backward
        context = contextvars.copy_context()
        self.turns = ThreadHandoff(lambda: context.run(self._whole), "nbdebug step_through")
        layers.connect(self)

    # The thread of the step ------------------------------------------------------------------------------------------

    def _whole(self) -> None:
        self._change_over()  # the same numbers, and from here on each has its own
        try:
            with self._caller.resume(), contextlib.ExitStack() as attached:
                attached.enter_context(uncompiled())
                attached.callback(self.layers.detach)
                self.layers.attach()
                engine = EngineWatch(self._backward_begins, self._backward_ended)
                attached.callback(engine.detach)
                engine.attach()
                attached.callback(self._detach_gradients)
                self._stepped()
        except Abandoned:
            pass
        except BaseException as error:  # the user's, whatever it is: it is reported, and it ends this thread only
            self.error, self.raised = _from_users_frame(error), self._where(error)
        finally:
            with numbers.unobserved():  # modes that the caller had are this thread's until it ends
                self._finished()

    def _stepped(self) -> None:
        returned = self.step()
        with numbers.unobserved():
            loss = _loss(returned)
            due = self.backward and not self._went_back and loss is not None and loss.requires_grad
        if loss is not None and not self._went_back:
            self.border(self._at_loss, loss)
            if due and torch.is_grad_enabled():
                loss.backward()
        with numbers.unobserved():
            self.result = map_tensors(
                returned, lambda tensor: tensor.detach()
            )  # its graph would keep the step's memory

    def _finished(self) -> None:
        """Everything as it was, or as a plain step leaves it; the caller's random numbers as the caller left them."""
        self.stop, undo = None, self.restore or self.turns.abandoned
        self.layers.forget()
        self._open.clear()
        if undo:
            if not self._callers_turn:
                self._change_over()
            callers = ProcessState()
            self.before.restore()
            callers.put_back()
        self.step = self.before = self._caller = self._shared = None  # type: ignore[assignment]

    def event(self, event: StepEvent, inputs: Named, outputs: Named, site: Any = None) -> None:
        """Wait here, where the goal asks for it. Raises Abandoned."""
        self.turns.check()
        if self.fault or not self.goal(event):
            return
        self.stop = StepStop(event.place, inputs, outputs, site=site, culprit=event.culprit)
        if event.place.phase == AFTER:
            self.stop.notes += self.layers.remarks(event.culprit)
        self.stop.read()
        self._change_over()
        self.turns.wait()  # abandoned: the numbers in force stay the caller's
        self._change_over()
        self.stop, self.last = None, event.place

    def _change_over(self) -> None:
        self._shared.change_over()
        self._callers_turn = not self._callers_turn

    def border(self, what: Callable[..., Any], *args: Any) -> None:
        """A fault of nbdebug's own ends the stops, not the step."""
        if self.fault or not self.turns.inside:
            return
        try:
            with numbers.unobserved():
                what(*args)
        except Abandoned:
            raise
        except Exception as fault:
            self.fault = f"{type(fault).__name__}: {fault}"

    # What happens in it ----------------------------------------------------------------------------------------------

    def begins(self, call: LayerCall) -> None:
        call.worst = numbers.worst_value([tensor for _, tensor in call.given])
        culprit = call.depth == 0 and call.worst > numbers.FINE and self._sound
        self.event(StepEvent(call.place(BEFORE), culprit), call.given, [], call.site)

    def ends(self, call: LayerCall, output: Any) -> None:
        outputs = [(name, tensor.detach()) for name, tensor in numbers.named_tensors(output, "output")]
        low, high, worst = numbers.value_range([tensor for _, tensor in outputs])
        self.layers.note(call, low, high, worst == numbers.FINE)
        culprit = call.spoils(worst)
        if culprit:
            call.blame()
        if call.depth == 0:
            self._sound = self._sound and worst == numbers.FINE
        self.event(StepEvent(call.place(AFTER), culprit), call.given, outputs, call.site)

    def _detach_gradients(self) -> None:
        while self._gradients:
            self._gradients.pop().detach()

    def _where(self, error: BaseException) -> LayerPlace | None:
        """The layer that an error came out of; of one in backward, the innermost that had begun."""
        raised = self.layers.raised_in(error)
        return raised or (self._open[-1].place(BACKWARD) if self._open else None)

    def _at_loss(self, loss: torch.Tensor) -> None:
        culprit = self._sound and not numbers.finite([loss])
        self._sound = self._sound and not culprit
        self.event(StepEvent(LayerPlace("the loss", "", LOSS, 0), culprit), [], [("loss", loss.detach())])

    def _backward_begins(self, backward: Backward) -> None:
        self.border(self._follow, backward)

    def _follow(self, backward: Backward) -> None:
        self._went_back = self._went_back or backward.accumulate
        for call in self.layers.in_order():
            call.blamed, call.finite_gradient = False, True
        # Of a loss that is not finite no gradient can be: nothing is to blame then.
        self._sound = self._spoilable = numbers.finite([r for r in backward.roots if isinstance(r, torch.Tensor)])
        gradients = NodeHooks(
            self.layers.calls, self.layers.outside, self._arrived, self._handed_on, numbers.finite, self.border
        )
        gradients.attach(backward)
        self._gradients.append(gradients)

    def _backward_ended(self, backward: Backward, result: Any) -> None:
        if self.turns.inside:
            self._open.clear()
            self._detach_gradients()

    def _arrived(self, call: LayerCall, gradients: Named) -> None:
        """A gradient that is not finite and comes to an outermost layer was made outside of any, unless a layer that
        ran backward before has made one."""
        self._open.append(call)
        culprit = self._sound and call.depth == 0 and not call.finite_gradient
        self._sound = self._sound and not culprit
        self.event(StepEvent(call.place(BACKWARD), culprit), gradients, [])

    def _handed_on(self, call: LayerCall, arrived: Named, went: Named, finite: bool) -> None:
        culprit = self._spoilable and not finite and call.finite_gradient and not call.blamed
        self._sound = self._sound and finite
        if culprit:
            call.blame()
        if call in self._open:
            self._open.remove(call)
        self.layers.note_gradient(call, finite)
        self.event(StepEvent(call.place(BACKWARD_DONE), culprit), arrived, went)


def _loss(returned: Any) -> torch.Tensor | None:
    """The one number in what a step has returned: itself, what it calls loss, or the first number that wants a
    gradient."""
    named = loss_in(returned)
    candidates = [t for t in (returned, named) if isinstance(t, torch.Tensor)]
    candidates += output_tensors(returned) if isinstance(returned, (tuple, list)) else []
    return next((t for t in candidates if t.numel() == 1 and (t.requires_grad or t is returned or t is named)), None)


def _from_users_frame(error: BaseException) -> BaseException:
    """Its traceback without the first frames, which are nbdebug's and hold the whole run."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_OURS):
        at = at.tb_next
    return error.with_traceback(at)
