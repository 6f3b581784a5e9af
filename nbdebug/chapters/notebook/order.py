"""Cells that ran in an order in which they can't all work: a name was missing when a cell ran, and is there now."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from nbdebug.chapters.notebook.cells import History, names_in
from nbdebug.chapters.notebook.facts import TooEarly

_TRACEBACK = vars(BaseException)["__traceback__"]


def too_early(names: Mapping[str, Any], history: History, error: BaseException | None) -> list[TooEarly]:
    """The last failure, where it was a missing name that a later cell has defined; nothing once the cell ran again."""
    if error is None or not issubclass(type(error), NameError) or issubclass(type(error), UnboundLocalError):
        return []
    missing = getattr(error, "name", None)
    at, failed = _TRACEBACK.__get__(error), None
    while at is not None:
        number = history.cell_of(at.tb_frame.f_code.co_filename)
        if number is not None and failed is None:
            failed = number, at.tb_lineno
        at = at.tb_next
    if type(missing) is not str or missing not in names or failed is None:
        return []
    later = [b for b in history.bindings(missing) if b.number > failed[0]]
    if not later or history.same(failed[0])[-1] > later[0].number:
        return []
    return [TooEarly(missing, history.cells[failed[0]].place(failed[1]), history.place(later[0]))]


def applied_twice(names: Mapping[str, Any], history: History) -> list[str]:
    """Notes on cells that ran more than once and change a tensor or an array by itself: `x = x / 255`."""
    notes = []
    for name, value in names.items():
        kind = type(value)
        if kind.__module__.partition(".")[0] not in ("torch", "numpy", "pandas") or kind.__name__ not in (
                "Tensor", "ndarray", "DataFrame"):
            continue
        bindings = history.bindings(name, "assign")
        own = [b for b in bindings if isinstance(b.value, ast.BinOp) and name in names_in(b.value)
               and isinstance(b.value.op, (ast.Div, ast.Sub, ast.Mult))]
        if not own:
            continue
        last = own[-1]
        runs = [b for b in bindings if history.text(b) == history.text(last) and b.number in history.same(last.number)]
        between = [b for b in bindings if len(runs) > 1 and runs[-2].at < b.at < runs[-1].at]
        if len(runs) > 1 and not between and not _in_loop(last.node, history, last.number):
            cells = " and ".join(f"In [{b.number}]" for b in runs[-2:])
            notes.append(f"`{history.text(last)}` ran in {cells}: it changes `{name}` by itself, so its effect is there "
                         f"{len(runs)} times. If once was meant, give the result a name of its own.")
    return notes


def _in_loop(node: ast.stmt, history: History, number: int) -> bool:
    return node not in history.cells[number].body
