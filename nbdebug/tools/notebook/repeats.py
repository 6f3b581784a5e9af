"""Cells that ran again: statements that consume their own result, or act a second time on the same object."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Container, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from nbdebug.observe.variables import class_attribute, closure_variables, members
from nbdebug.tools.notebook.cells import (
    CellBinding,
    CellHistory,
    bound,
    cell_lines,
    dotted,
    error_message,
    first_training_use,
    names_in,
    nodes,
    root_of,
)
from nbdebug.tools.notebook.facts import NOWHERE, RunTwice

SAME = frozenset(
    "to cuda cpu float double half long bool detach train eval compile requires_grad_ rename astype fillna clip clamp "
    "contiguous sort_values sort_index sorted drop_duplicates dropna copy clone".split()
)
"""Methods that change nothing when they are applied again."""
REFUSED = (KeyError, AttributeError, TypeError, ValueError, IndexError, RuntimeError, FileExistsError)
ONCE = re.compile(r"already|more than one|exists|twice")
"""Messages of what can be done once: a second `optimizer.add_param_group(…)`, `frame.insert(0, "id", …)`."""
"""What a second application raises: what it takes is gone, or is of another kind by now; RecursionError is one."""


def runs_twice(names: Mapping[str, Any], history: CellHistory, error: BaseException | None) -> list[RunTwice]:
    """The last failure, if its statement consumes its own result (`table = table.drop(…)`, `y = table.pop("y")`) and
    ran before on the same variable; else a tensor or an array that a statement has divided a second time by what does
    not come from it (`x = x / 255`), if a call takes it after that."""
    if error is not None and issubclass(type(error), REFUSED):
        for number, line in reversed(list(cell_lines(error, history))):
            if twice := _refused(number, line, error, names, history):
                return [dataclasses.replace(twice, error=type(error).__name__)]
    for number in reversed(history.cells):
        for statement in history.cells[number].body:
            if twice := _used_up(number, statement, names, history):
                return [twice]
            path = _spoiled(statement, names, history) or _rescaled(number, statement, names, history)
            wrapped = "" if path else _wrapped(number, statement, names, history)
            form = _form if wrapped else ast.unparse
            if (one := path or wrapped) and (twice := _run_before(history, number, statement, one, form)) is not None:
                return [twice]
    return []


def _used_up(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A loop over an iterator (`pairs = zip(x, y)`) through which a loop of an earlier cell has gone to its end."""
    path = dotted(statement.iter) if isinstance(statement, ast.For) else ""
    if not path or class_attribute(names.get(path), "__next__") is None:
        return None
    if any(isinstance(n, (ast.Break, ast.Return, ast.Yield)) for n in ast.walk(statement)):
        return None
    twice = _run_before(history, number, statement, path)
    return twice and dataclasses.replace(twice, statement=twice.statement.partition("\n")[0])


def _refused(
    number: int, line: int, error: BaseException, names: Mapping[str, Any], history: CellHistory
) -> RunTwice | None:
    """What of one line of a traceback had run before."""
    statement = history.cells[number].statement(line)
    if statement is not None and issubclass(type(error), RecursionError):
        return _calls_itself(statement, history)
    if statement is None or statement not in history.cells[number].statements:
        return None
    done = statement.value if isinstance(statement, ast.Expr) and ONCE.search(error_message(error)) else None
    once = [dotted(done.func).rpartition(".")[0]] if isinstance(done, ast.Call) else []
    for path in [*filter(None, once), *_consumed(statement)]:
        if root_of(path) in names and (twice := _run_before(history, number, statement, path)) is not None:
            return twice
    return _used_after(names, history, number, statement, f"{type(error).__name__}: {error_message(error)}")


def _calls_itself(statement: ast.stmt, history: CellHistory) -> RunTwice | None:
    """Where a failing line calls a function that was kept (`plain = net.forward`) before another took its place, in a
    cell that ran again: then the other was kept, which is the line's own."""
    called = {n.func.id for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    for name in called:
        kept = [b for b in history.bindings(name, "assign") if dotted(b.value)]
        if len(kept) > 1 and any(kept[-2].at < b.at < kept[-1].at for b in history.bindings(dotted(kept[-1].value))):
            first, last = kept[0], kept[-1]
            text, places = history.text(last), (history.place(last), history.place(first))
            return RunTwice(name, text, len(kept), where=places[0], first=places[1])
    return None


def _form(node: ast.AST) -> str:
    """A statement without its numbers and texts."""
    return re.sub(r"Constant\(value=[^()]*\)", "Constant()", ast.dump(node))


def _wrapped(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> str:
    """The variable that a statement gives to a function or a class of which it becomes the result (`model =
    Adapter(model)`), where it holds another of its own kind by now."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    call = statement.value if isinstance(statement, ast.Assign) else None
    path = dotted(target)
    if not isinstance(call, ast.Call) or not path or path not in [dotted(argument) for argument in call.args]:
        return ""
    root, *inside = path.split(".")
    thing = names.get(root)
    for part in inside:
        thing = members(thing).get(part)
    if thing is None or history.bindings(path)[-1].number != number:
        return ""
    if type(thing) is FunctionType:
        codes = [getattr(part, "__code__", None) for part in closure_variables(thing).values()]
        return path if thing.__code__ in codes else ""
    kind = type(thing)
    return path if any(type(part) is kind for part in members(thing).values()) and hasattr(kind, "__dict__") else ""


MOVES = frozenset("unsqueeze permute transpose swapaxes expand_dims one_hot pad repeat merge join".split())
"""Functions that give another shape, or other columns, when they are applied again."""
MISFIT = re.compile(r"shape|size|dim|channel|out of|range|bound|KeyError", re.IGNORECASE)


def _used_after(
    names: Mapping[str, Any], history: CellHistory, number: int, statement: ast.stmt, message: str
) -> RunTwice | None:
    """The array that a failing line takes, if what its shape or its numbers come from ran a second time on it."""
    for name in names_in(statement) if MISFIT.search(message) else ():
        last = max((b for b in history.bindings(name) if b.number <= number), key=lambda b: b.at, default=None)
        if last is None or not _is_array(names.get(name)) or last.node not in history.cells[last.number].body:
            continue
        value = last.value
        moved = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in MOVES
        shifted = isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub, ast.Mult, ast.Div))
        own = name in names_in(value) or isinstance(last.node, ast.AugAssign)
        if own and (moved or shifted) and (twice := _run_before(history, last.number, last.node, name)) is not None:
            return twice
    return None


def _rescaled(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> str:
    """The array that a statement divides, as the last of those that bind it, if a call takes it after that."""
    return next(
        (
            last.path
            for last in history.cells[number].bindings
            if last.node is statement
            and _rescales(last)
            and last is history.bindings(last.path)[-1]
            and _is_array(names.get(last.path))
            and first_training_use(history, last.path, last.at) is not None
        ),
        "",
    )


def _spoiled(statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> str:
    """The variable on which one statement ran again, as it shows: a column computed from itself (`table["y"] =
    table["y"].map(…)`) has no value left, a list of steps ends with one of the same kind twice, a list of names that a
    cell counts has one of them twice; "" of all others."""
    if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Subscript):
        path, key = dotted(target.value), getattr(target.slice, "value", None)
        table: Any = names.get(path)
        if type(table).__module__.startswith("pandas") and ast.unparse(statement.value).startswith(
            f"{ast.unparse(target)}.map("
        ):
            return path if key in table.columns and len(table) and table[key].isna().to_numpy().all() else ""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
        return ""
    path = dotted(call.func.value)
    items = names.get(path)
    if type(items) is list and len(items) > 2 and all(type(one) is str for one in items):
        twice = items[-1] in items[:-1] and len(set(items)) == len(items) - 1
        return path if twice and _counted(path, history) else ""
    if type(items) is not list or not all(
        callable(one) and not issubclass(type(one), torch.nn.Module) for one in items
    ):
        return ""
    kinds = [getattr(one, "__qualname__", type(one)) for one in items]
    return path if kinds[-1:] and kinds[-1] in kinds[:-1] else ""


def _counted(path: str, history: CellHistory) -> bool:
    """Whether a cell asks how many items a list has."""
    calls = (n for cell in history.reaching(root_of(path)) for n in nodes(cell.statements) if isinstance(n, ast.Call))
    return any(dotted(n.func) in ("len", "enumerate") and path in map(dotted, n.args) for n in calls)


def _run_before(
    history: CellHistory, number: int, statement: ast.stmt, path: str, form: Callable[[ast.AST], str] = ast.unparse
) -> RunTwice | None:
    """Where the statement has run in an earlier cell, since the variable was last made anew. form: of two statements
    that are the same."""
    at, text = (number, statement.lineno), form(statement)
    made = [
        b
        for b in history.bindings(path)
        if b.at < at and path not in names_in(b.value) and not isinstance(b.node, ast.AugAssign)
    ]
    fresh = max(made, key=lambda b: b.at, default=None)
    since = fresh.at if fresh is not None else (0, 0)
    before = [
        (cell.number, one.lineno)
        for cell in history.mentioning(root_of(path))
        if cell.number < number
        for one in cell.statements
        if (cell.number, one.lineno) > since and form(one) == text
    ]
    if not before:
        return None
    return RunTwice(
        path,
        history.text_of(number, statement),
        1 + len(before),
        "",
        history.text(fresh) if fresh is not None else "",
        history.cells[number].place(statement.lineno),
        history.cells[before[0][0]].place(before[0][1]),
        history.place(fresh) if fresh is not None else NOWHERE,
    )


def _rescales(binding: CellBinding) -> bool:
    """`x = x / 255`, `x = (x - mean) / std`, `x /= 255`: once more is another value. `x = x / x.max()` is not."""
    node, path = binding.node, binding.path
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Div) and path not in names_in(node.value)
    value = binding.value
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Div) or path in names_in(value.right):
        return False
    left = value.left
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub) and path not in names_in(left.right):
        left = left.left
    return dotted(left) == path


def _consumed(statement: ast.stmt) -> Iterator[str]:
    """The variables that a statement computes from themselves, or takes something out of."""
    for path, how, _, value in bound(statement):
        last = dotted(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        if how == "assign" and root_of(path) in names_in(value) and last not in SAME:
            yield path
    if isinstance(statement, ast.AugAssign) and dotted(statement.target):
        yield dotted(statement.target)
    if isinstance(statement, ast.Delete):
        yield from (dotted(t.value) for t in statement.targets if isinstance(t, ast.Subscript) and dotted(t.value))
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and dotted(node.func.value):
            inplace = any(k.arg == "inplace" and getattr(k.value, "value", None) is True for k in node.keywords)
            if inplace or node.func.attr in ("pop", "remove", "popitem"):
                yield dotted(node.func.value)


def applied_twice(names: Mapping[str, Any], history: CellHistory, named: Container[str]) -> list[str]:
    """Notes on cells that ran more than once and compute a tensor or an array from itself: `x = x - 1`. named: the
    variables of which a finding tells it."""
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
                and last.path not in named
                and _is_array(names.get(last.path))
                and last is history.bindings(last.path)[-1]
                and not [b for b in history.bindings(last.path) if numbers[-2] < b.number < numbers[-1]]
            ):
                cells = " and ".join(f"In [{number}]" for number in numbers[-2:])
                notes.append(
                    f"`{history.text(last)}` ran in {cells}: it computes `{last.path}` from itself, so it has been "
                    f"applied {len(numbers)} times. If once was intended, give the result another name."
                )
    return notes


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] in ("torch", "numpy", "pandas") and kind.__name__ in (
        "Tensor",
        "ndarray",
        "DataFrame",
    )
