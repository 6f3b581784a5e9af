"""One stop: the frame, the values that are available there, the prompt, and the record where nobody can type.

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
import contextvars
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import LIBRARY, USER, cell_name, kind_of
from nbdebug.observe.tensors import can_be_nonfinite, finite, plain_values, unobserved
from nbdebug.observe.variables import running_shell
from nbdebug.report import Report, Table
from nbdebug.text import count

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


COLUMNS = ["name", "shape", "dtype", "device", "min", "max", "mean", "not finite"]
_MOST = 60
"""Rows of a table."""


def tensors_of(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value, by the expression that reads them: inp[0], out['logits']."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping) and depth < 3:
        for key in list(value)[:20]:
            if isinstance(key, (str, int)):
                yield from tensors_of(f"{name}[{key!r}]", value[key], depth + 1)
    elif isinstance(value, (tuple, list)) and depth < 3:
        for place, part in enumerate(value[:20]):
            yield from tensors_of(f"{name}[{place}]", part, depth + 1)


def numbers_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape, dtype, device; of what can be read the smallest, the largest and the mean of the finite elements, and how
    many are not finite."""
    facts: dict[str, Any] = {
        "shape": str(tuple(tensor.shape)),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "min": None,
        "max": None,
        "mean": None,
        "not finite": None,
    }
    try:
        with unobserved():
            values = plain_values(tensor)
            if values.numel() and values.device.type != "meta":
                facts.update(_range(values))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        pass  # a tensor of a kind whose values can't be read, such as a fake one: its shape is shown
    return facts


def _range(values: torch.Tensor) -> dict[str, Any]:
    if not can_be_nonfinite(values):
        wide = values.double() if values.dtype in (torch.uint64, torch.int64) else values.float()
        return {"min": values.min().item(), "max": values.max().item(), "mean": wide.mean().item(), "not finite": 0}
    good = finite(values)
    bad = values.numel() - int(good.sum())
    good_values = values.float() if values.element_size() < 4 else values
    good_values = good_values[good] if bad else good_values
    if not good_values.numel():
        return {"not finite": bad}
    low, high = good_values.aminmax()
    return {
        "min": low.item(),
        "max": high.item(),
        "mean": good_values.mean(dtype=torch.float64).item(),
        "not finite": bad,
    }


def describe(tensor: torch.Tensor) -> str:
    """ "float32 (16, 4) on cpu, -2.1 to 2.3, mean 0.01, all finite"."""
    facts = numbers_of(tensor)
    text = f"{facts['dtype']} {facts['shape']} on {facts['device']}"
    if facts["min"] is not None:
        text += f", {facts['min']:.4g} to {facts['max']:.4g}, mean {facts['mean']:.4g}"
    if facts["not finite"] is None:
        return text
    return text + (f", {facts['not finite']:,} not finite" if facts["not finite"] else ", all finite")


def locals_of(frame: FrameType, but: Any = ()) -> dict[str, Any]:
    """The tensors among a function's locals, in the order of the code, without those that are shown already."""
    shown = {id(value) for value in but}
    names = (*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars)
    variables = frame.f_locals
    return {name: variables[name] for name in names if name in variables and id(variables[name]) not in shown}


def table(title: str, values: Mapping[str, Any]) -> Table | None:
    """One row for each tensor; None where there is none."""
    tensors = [pair for name, value in values.items() for pair in tensors_of(name, value)]
    rows = [
        [name, *(facts[column] for column in COLUMNS[1:])]
        for name, tensor in tensors[:_MOST]
        for facts in [numbers_of(tensor)]
    ]
    left = f"{count(len(tensors) - _MOST, 'tensor is', 'tensors are')} left out." if len(tensors) > _MOST else ""
    return Table(title, COLUMNS, rows, left) if rows else None


def report(
    question: str,
    subject: str,
    headline: str,
    facts: Mapping[str, Any],
    values: Mapping[str, Any],
    local: Mapping[str, Any],
    function: str,
    notes: tuple[str, ...] = (),
) -> Report:
    """The record of one stop. values: those of the layer, by name; local: the locals of the function around it."""
    tables = [table("At the stop", values), table(f"Locals of {function}", local)]
    return Report(
        question,
        subject=subject,
        notes=notes,
        facts={"stop": dict(facts)},
        headline=headline,
        tables=[t for t in tables if t is not None],
    )


_NO_FRAME = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""The call of such a function returns before its body runs."""


def own_code(module: nn.Module) -> CodeType | None:
    """The code of the layer's own forward, below its decorators; None for a layer of torch's, whose forward shows
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


def calling_frame(frame: FrameType | None) -> FrameType | None:
    """Outwards from a hook, the first frame that is neither torch's nor nbdebug's nor Python's own."""
    while frame is not None and kind_of(frame.f_code) not in (USER, LIBRARY):
        frame = frame.f_back
    return frame


def calling_backward(frame: FrameType) -> FrameType | None:
    """The frame that called backward. On a GPU the engine runs hooks in a thread of its own, above which there is
    nothing: then the thread that waits in the engine is looked for."""
    caller = calling_frame(frame)
    if caller is not None:
        return caller
    waiting = (calling_frame(_in_engine(top)) for top in sys._current_frames().values())
    return next((frame for frame in waiting if frame is not None), None)


def main_waits() -> bool:
    """Whether the main thread waits for the end of backward."""
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


def add_names(frame: FrameType, values: Mapping[str, Any]) -> dict[str, str]:
    """Add these to the frame's locals. Each name → its name there: `layer_out` where the code has another
    `out`, which keeps its value."""
    code, variables = frame.f_code, frame.f_locals
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if not code.co_flags & inspect.CO_OPTIMIZED:  # not of a function: these are the user's variables
        own.update(variables)
    names = {}
    for name, value in values.items():
        there = name
        while there in own and variables.get(there) is not value:
            there = f"layer_{there}"
        names[name] = there
        if there not in own:
            variables[there] = value
    return names


def remove_names(frame: FrameType, names: Mapping[str, str], before: frozenset[str]) -> None:
    """Remove the added names. before: the names without them. Needed where the locals are the user's variables; those
    of a function end with its call."""
    variables = frame.f_locals
    for there in set(names.values()) - before:
        try:
            variables.pop(there, None)
        except (AttributeError, ValueError, TypeError):  # Python 3.13 lets a function's frame forget no name
            variables[there] = None


MOMENTS = {
    "before": "before its forward",
    "first line": "at the start of its forward",
    "return": "at the return of its forward",
    "after": "after its forward",
    "raised": "when an exception left its forward",
    "gradient": "when its gradient arrives",
}


@dataclasses.dataclass(frozen=True)
class StopEvent:
    """Where training stopped. layer: its label; moment: a key of MOMENTS; given: the values available there, by name.
    frame: where to stop; None where there is no frame of the user's."""

    layer: str
    moment: str
    step: int
    given: Mapping[str, Any]
    frame: FrameType | None

    @property
    def headline(self) -> str:
        where = place(self.frame)
        return f"Stopped at {self.layer} {MOMENTS[self.moment]}, in step {self.step}" + (
            f": {where}." if where else "."
        )


def stop(
    at: StopEvent, question: str, subject: str, blocked: bool = False, context: contextvars.Context | None = None
) -> Report | None:
    """Stop there: returns when the user continues the training, or at once with a record where nobody can type.
    blocked: the main thread waits for this one; context: its context, by which a kernel knows where to ask.

    Raises KeyboardInterrupt where the user leaves the training."""
    way, notes = mode(blocked), ["Nobody can type here, so training continues after this record."]
    if at.frame is not None and way != "record":
        try:
            if context is not None:
                context.run(_interact, way, at)
            else:
                _interact(way, at)
            return None
        except Exception as wrong:  # a front end that refuses to ask, a debugger that lacks what we use
            notes = [f"The debugger could not be opened ({type(wrong).__name__}: {wrong}), so this was recorded."]
    return _record(at, question, subject, tuple(notes))


def _interact(way: str, at: StopEvent) -> None:
    frame = at.frame
    assert frame is not None
    before = frozenset(frame.f_locals)
    names = add_names(frame, at.given)
    header = _header(at, names, way)
    try:
        if way == "ipdb":
            if at.moment == "first line":
                ipdb_at_first_line(frame, header)
            else:
                ipdb_here(frame, header, ends=at.moment == "return")
            return
        print(header, flush=True)
        if at.moment == "first line":
            debugpy_at_first_line(frame)
        elif at.moment == "return":
            debugpy_at_end(frame, calling_frame(frame.f_back))
        else:
            debugpy_here(frame)
    finally:
        if at.moment != "first line":  # that one stops only now: added names end with the frame
            remove_names(frame, names, before)


def _header(at: StopEvent, names: Mapping[str, str], way: str) -> str:
    """The text above the prompt."""
    lines = [at.headline]
    for name, value in at.given.items():
        for what, tensor in list(tensors_of(names[name], value))[:4]:
            lines.append(f"  {what}: {describe(tensor)}")
    renamed = ", ".join(f"`{name}`" for name, there in names.items() if name != there)
    lines.append(
        f"  Available: {', '.join(names.values())}." + f" ({renamed} is a variable of yours here.)" * bool(renamed)
    )
    if way == "ipdb":
        lines.append("  c continues, n runs one line, u goes to the caller, q ends the training.")
    return "\n".join(lines)


def _record(at: StopEvent, question: str, subject: str, notes: tuple[str, ...]) -> Report:
    values = {name: value for name, value in at.given.items() if name not in ("module", "name", "step", "grad_in")}
    function, local = "", {}
    if at.frame is not None:
        kind = type(at.given["module"]).__name__ if at.moment in ("return", "raised") else ""
        function = ".".join(part for part in (kind, at.frame.f_code.co_name) if part)
        if at.frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # of a cell there are too many, and they stay
            local = locals_of(at.frame, but=values.values())
    facts = {
        "layer": at.given["name"],
        "type": type(at.given["module"]).__name__,
        "moment": MOMENTS[at.moment],
        "step": at.step,
        "place": place(at.frame),
    }
    return report(question, subject, at.headline, facts, values, local, function, notes)
