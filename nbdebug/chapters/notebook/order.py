"""Cells that ran in an order in which they can't all work: a name was missing when a cell ran, and is there now."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from nbdebug.chapters.notebook.cells import History
from nbdebug.chapters.notebook.facts import TooEarly
from nbdebug.chapters.notebook.statements import names_in

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
    if not later:
        return []
    line = history.cells[failed[0]].place(failed[1]).text or ""
    if any(line in cell.typed for number, cell in history.cells.items() if number >= later[0].number):
        return []  # it ran again since
    return [TooEarly(missing, history.cells[failed[0]].place(failed[1]), history.place(later[0]))]


def applied_twice(names: Mapping[str, Any], history: History) -> list[str]:
    """Notes on cells that ran more than once and change a tensor or an array by itself: `x = x / 255`."""
    runs: dict[str, list[int]] = {}
    for number, cell in history.cells.items():
        runs.setdefault(cell.source.strip(), []).append(number)
    notes = []
    for numbers in runs.values():
        for last in history.cells[numbers[-1]].bindings if len(numbers) > 1 else ():
            value = last.value
            if (
                last.node in history.cells[last.number].body
                and isinstance(value, ast.BinOp)
                and isinstance(value.op, (ast.Div, ast.Sub, ast.Mult))
                and last.path in names_in(value)
                and _is_array(names.get(last.path))
                and last is history.bindings(last.path)[-1]
                and not [b for b in history.bindings(last.path) if numbers[-2] < b.number < numbers[-1]]
            ):
                cells = " and ".join(f"In [{number}]" for number in numbers[-2:])
                notes.append(
                    f"`{history.text(last)}` ran in {cells}: it changes `{last.path}` by itself, so its "
                    f"effect is there {len(numbers)} times. If once was meant, give the result another name."
                )
    return notes


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] in ("torch", "numpy", "pandas") and kind.__name__ in (
        "Tensor",
        "ndarray",
        "DataFrame",
    )
