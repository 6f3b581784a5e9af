"""What an exception keeps: the variables of the frames that its traceback leads to, and the exceptions before it."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

from nbdebug.chapters.memory.holding.opened import variables
from nbdebug.finding import Where
from nbdebug.observe.sites import Site, cell_name, source_text

SHELLS = ("nbdebug", "IPython", "ipykernel")
"""Packages whose frames stand between the notebook and the user's code."""


class Failed(NamedTuple):
    """One frame of a traceback. variables: its own, by name; where: the line at which it failed."""

    function: str
    variables: dict[str, Any]
    where: Where


def linked(error: BaseException) -> list[tuple[str, Any]]:
    """What an exception refers to beside its attributes, read past properties of its class."""
    own = vars(BaseException)
    found = [(key, own[key].__get__(error)) for key in ("args", "__traceback__", "__cause__", "__context__")]
    return [(key, value) for key, value in found if value]


def frames_of(trace: TracebackType | None) -> Iterator[Failed]:
    """The frames with variables, outermost first, without those of the shell."""
    while trace is not None:
        frame = trace.tb_frame
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in SHELLS:
            held = variables(frame)
            if held:
                code = frame.f_code
                site = Site(code.co_filename, trace.tb_lineno, code.co_name)
                yield Failed(
                    code.co_name,
                    held,
                    Where(file=site.file, line=site.line, text=source_text(site), cell=cell_name(site.file)),
                )
        trace = trace.tb_next
