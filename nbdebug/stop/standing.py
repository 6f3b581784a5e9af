"""One stop: what is said, what is at hand, and how it is done."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

from nbdebug.finding import Report
from nbdebug.stop import debuggers, recorded
from nbdebug.stop.frames import calling, lend, place, take_back

ENDS = {
    "before": "before its forward",
    "first line": "at the start of its forward",
    "return": "at the return of its forward",
    "after": "after its forward",
    "raised": "when an exception left its forward",
    "gradient": "when its gradient arrives",
}


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where training stands. layer: as a person would say it; moment: one of ENDS; given: what is at hand, by name.
    frame: where to stop; None where there is no frame of the user's."""

    layer: str
    moment: str
    step: int
    given: Mapping[str, Any]
    frame: FrameType | None

    @property
    def headline(self) -> str:
        where = place(self.frame)
        return f"Stopped at {self.layer} {ENDS[self.moment]}, in step {self.step}" + (f": {where}." if where else ".")


def stand(
    at: Moment, question: str, subject: str, blocked: bool = False, context: contextvars.Context | None = None
) -> Report | None:
    """Stop there: returns when the user lets training go on, or at once with a record where nobody can type. blocked:
    the main thread waits for this one; context: its context, by which a kernel knows where to ask.

    Raises KeyboardInterrupt where the user leaves the training."""
    way, notes = debuggers.way(blocked), ["Nobody can type here, so training goes on after this record."]
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


def _interact(way: str, at: Moment) -> None:
    frame = at.frame
    assert frame is not None
    before = frozenset(frame.f_locals)
    names = lend(frame, at.given)
    said = _said(at, names, way)
    try:
        if way == "ipdb":
            if at.moment == "first line":
                debuggers.ipdb_at_first_line(frame, said)
            else:
                debuggers.ipdb_here(frame, said, ends=at.moment == "return")
            return
        print(said, flush=True)
        if at.moment == "first line":
            debuggers.debugpy_at_first_line(frame)
        elif at.moment == "return":
            debuggers.debugpy_at_end(frame, calling(frame.f_back))
        else:
            debuggers.debugpy_here(frame)
    finally:
        if at.moment != "first line":  # that one stops only now: what was lent goes with the frame
            take_back(frame, names, before)


def _said(at: Moment, names: Mapping[str, str], way: str) -> str:
    """What stands above the prompt."""
    lines = [at.headline]
    for name, value in at.given.items():
        for what, tensor in list(recorded.tensors_of(names[name], value))[:4]:
            lines.append(f"  {what}: {recorded.in_words(tensor)}")
    taken = ", ".join(f"`{name}`" for name, there in names.items() if name != there)
    lines.append(f"  At hand: {', '.join(names.values())}." + f" (You have a {taken} of your own here.)" * bool(taken))
    if way == "ipdb":
        lines.append("  c goes on, n runs a line, u shows the caller, q leaves the training.")
    return "\n".join(lines)


def _record(at: Moment, question: str, subject: str, notes: tuple[str, ...]) -> Report:
    given = {name: value for name, value in at.given.items() if name not in ("module", "name", "step", "grad_in")}
    function, local = "", {}
    if at.frame is not None:
        kind = type(at.given["module"]).__name__ if at.moment in ("return", "raised") else ""
        function = ".".join(part for part in (kind, at.frame.f_code.co_name) if part)
        if at.frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # of a cell there are too many, and they stay
            local = recorded.locals_of(at.frame, but=given.values())
    facts = {
        "layer": at.given["name"],
        "type": type(at.given["module"]).__name__,
        "moment": ENDS[at.moment],
        "step": at.step,
        "place": place(at.frame),
    }
    return recorded.report(question, subject, at.headline, facts, given, local, function, notes)
