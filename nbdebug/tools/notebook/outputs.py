"""Memory that only `Out`, the last traceback or a list of losses holds, and whether a cell tried to free it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from nbdebug.observe.variables import is_user_module
from nbdebug.report import Where
from nbdebug.tools.notebook.cells import CellHistory, dotted, nodes, number_of, traceback_links
from nbdebug.tools.notebook.facts import NOWHERE, KeptOutput
from nbdebug.tools.notebook.stale_objects import is_tensor

FREES = ("collect", "empty_cache", "malloc_trim")
LEAST = 1 << 20
"""Bytes; less is never reported."""


def kept_outputs(outputs: Iterable[Any], history: CellHistory, error: BaseException | None) -> list[KeptOutput]:
    """outputs: what the shell keeps, as `free()` lists it: each with how, name, also, bytes, items, what and where.
    error: the last failure."""
    results = []
    for one in outputs:
        if one.bytes < LEAST:
            continue
        if one.how == "output":
            results.append(_output(one, history))
        elif one.how in ("traceback", "loss"):
            raised = one.how == "traceback"
            where = (_failed_line(error, history) or one.where) if raised else _first_append(one.name, history)
            freed = _freeing_statement("" if raised else one.name, number_of(where), history)
            how, mainly = ("traceback", _largest(error)) if raised else ("graph", one.name)
            results.append(KeptOutput(how, one.name, one.bytes, one.what, mainly, *freed, where=where))
    return results


def _failed_line(error: BaseException | None, history: CellHistory) -> Where | None:
    """The line at which a cell failed: of several cells in the traceback, the outermost."""
    for link in traceback_links(error):
        number = history.cell_of(link.tb_frame.f_code.co_filename)
        if number is not None:
            return history.cells[number].place(link.tb_lineno)
    return None


def _largest(error: BaseException | None) -> str:
    """The largest tensor among the variables of the calls that failed: "acts"; "" where there is none."""
    most, largest = 0, ""
    for link in traceback_links(error):
        frame = link.tb_frame
        if frame.f_locals is frame.f_globals or not is_user_module(str(frame.f_globals.get("__name__", ""))):
            continue  # a cell's own variables exist without the traceback
        for name, value in frame.f_locals.items():
            count = value.numel() * value.element_size() if is_tensor(value) else 0
            if count > most:
                most, largest = count, name
    return largest


def _first_append(name: str, history: CellHistory) -> Where:
    """The first line that adds something to this list or dict."""
    root = re.split(r"[.\[]", name)[0]
    for cell in history.mentioning(root):
        for node in nodes(history.reach(cell.number)):
            if isinstance(node, ast.Call) and _adds(node, name, root):
                return cell.place_of(node)
    bound = history.bindings(root)
    return history.place(bound[-1]) if bound else NOWHERE


def _adds(call: ast.Call, name: str, root: str) -> bool:
    """Whether a call adds a tensor to this list, or to a list in this dict."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("append", "extend"):
        return False
    target, item = ast.unparse(call.func.value), call.args[0] if call.args else None
    number = isinstance(item, ast.Call) and (
        dotted(item.func) in ("float", "int")
        or isinstance(item.func, ast.Attribute)
        and item.func.attr in ("item", "detach", "tolist")
    )
    return not number and (target in (name, root) or target.startswith(f"{name}["))


def _output(one: Any, history: CellHistory) -> KeptOutput:
    names = [one.name, *one.also]
    number = next((int(n[4:-1]) for n in names if n.startswith("Out[") and n[4:-1].isdigit()), None)
    if number is None or number not in history.cells:
        return KeptOutput("output", one.name, one.bytes, one.what)
    cell = history.cells[number]
    last = cell.body[-1] if cell.body else None
    expression = last.value if isinstance(last, ast.Expr) else None
    text = cell.text_of(expression) if expression is not None else ""
    variable = (
        next((n.id for n in ast.walk(expression) if isinstance(n, ast.Name)), "") if expression is not None else ""
    )
    statement, deleted, freed = _freeing_statement(variable, number, history)
    shown = next(n for n in names if n.startswith("Out["))
    where = cell.place(last.lineno if last is not None else None)
    return KeptOutput("output", shown, one.bytes, one.what, text, statement, deleted, freed, where)


def _freeing_statement(variable: str, number: int | None, history: CellHistory) -> tuple[str, bool, Where]:
    """The statement after this cell that tried to free the memory, whether it names this variable, and its place: `del
    features`, `features = None`, `gc.collect()`."""
    collected: tuple[str, bool, Where] = ("", False, NOWHERE)
    for cell in [c for n, c in history.cells.items() if number is not None and n > number]:
        for b in cell.bindings if variable and cell.mentions(variable) else ():
            if b.path == variable and (b.how == "del" or isinstance(b.value, ast.Constant) and b.value.value is None):
                return history.text(b), True, history.place(b)
        if collected[0] or not cell.mentions("collect") and not cell.mentions("empty_cache"):
            continue
        for node in nodes(history.reach(cell.number)):
            of = dotted(node.func) if isinstance(node, ast.Call) else ""
            if "." in of and of.rpartition(".")[2] in FREES:
                collected = ast.unparse(node), False, cell.place(getattr(node, "lineno", 1))
    return collected
