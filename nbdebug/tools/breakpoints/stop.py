"""One stop: the frame, the values that are available there, the prompt, and the record where nobody can type."""

from __future__ import annotations

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
from nbdebug.observe.tensors import can_be_nonfinite, finite, plain_values
from nbdebug.report import Report, Table
from nbdebug.text import count
from nbdebug.tools.breakpoints import debuggers
from nbdebug.tools.breakpoints.condition import unobserved

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
    way, notes = debuggers.mode(blocked), ["Nobody can type here, so training continues after this record."]
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
                debuggers.ipdb_at_first_line(frame, header)
            else:
                debuggers.ipdb_here(frame, header, ends=at.moment == "return")
            return
        print(header, flush=True)
        if at.moment == "first line":
            debuggers.debugpy_at_first_line(frame)
        elif at.moment == "return":
            debuggers.debugpy_at_end(frame, calling_frame(frame.f_back))
        else:
            debuggers.debugpy_here(frame)
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
