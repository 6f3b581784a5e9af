"""Was a variable used since? What cells that ran later do with it, as far as their text tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbdebug.chapters.notebook.cells import Binding, History, nodes
from nbdebug.chapters.notebook.statements import dotted, names_in
from nbdebug.finding import Where

At = tuple[int, int]
"""A cell, and a line in it."""
IDLE = frozenset(
    {
        "state_dict",
        "load_state_dict",
        "zero_grad",
        "eval",
        "parameters",
        "named_parameters",
        "to",
        "modules",
        "named_modules",
        "get_last_lr",
        "add_param_group",
        "children",
        "cpu",
        "cuda",
        "close",
    }
)
"""Methods that train nothing."""


def root_of(path: str) -> str:
    """The variable of a name: "models" of "models[0].fc"."""
    return path.partition("[")[0].partition(".")[0]


def calls_after(history: History, at: At, word: str) -> Iterator[tuple[int, ast.Call]]:
    """(cell, call) of the calls that ran after this place, in cells that can reach the word."""
    for number in [cell.number for cell in history.leading_to(word) if cell.number >= at[0]]:
        for root in history.reach(number):
            if number == at[0] and getattr(root, "lineno", 0) <= at[1] and root in history.cells[number].statements:
                continue
            for node in nodes([root]):
                if isinstance(node, ast.Call) and word in names_in(node):
                    yield number, node


def stepped(history: History, name: str, at: At) -> Where | None:
    """The first cell behind this place that calls something of the variable that trains, or hands it to a function."""
    for number, call in calls_after(history, at, name):
        of = dotted(call.func)
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if of.startswith(f"{name}.") and of.rpartition(".")[2] not in IDLE:
            return history.cells[number].place(_line(history, number, call))
        if any(dotted(value) == name for value in given) and not _reads_only(of):
            return history.cells[number].place(_line(history, number, call))
    return None


def _reads_only(function: str) -> bool:
    """Whether a function that is given a variable only shows or stores it, or makes something new from it."""
    last = function.rpartition(".")[2]
    return last in ("print", "display", "len", "type", "id", "repr", "str", "isinstance", "save", "dir", "vars") or (
        last[:1].isupper()
    )


def read(history: History, name: str, at: At) -> Where | None:
    """The first cell behind this place that reads the variable."""
    for cell in [cell for cell in history.leading_to(name) if cell.number >= at[0]]:
        number = cell.number
        for root in history.reach(number):
            own = root in cell.statements
            if number == at[0] and (not own or getattr(root, "lineno", 0) <= at[1]):
                continue
            for node in nodes([root]):
                if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                    return cell.place(node.lineno if own else None)
    return None


def same_thing(binding: Binding) -> bool:
    """Whether a statement leaves a variable what it was: `model = model.to(device)`, `model = torch.compile(model)`."""
    name, value = binding.path, binding.value
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.Name) and value.id == name
    of = value.func
    while isinstance(of, (ast.Attribute, ast.Call)):
        of = of.value if isinstance(of, ast.Attribute) else of.func
    last = dotted(value.func).rpartition(".")[2]
    return (
        isinstance(of, ast.Name)
        and of.id == name
        or (name in names_in(value) and last in ("compile", "DataParallel", "DistributedDataParallel", "prepare", "to"))
    )


def _line(history: History, number: int, node: ast.AST) -> int | None:
    """The line of a node, where it stands in the cell itself and not in a function of another one."""
    line = getattr(node, "lineno", None)
    own = any(
        getattr(s, "lineno", 0) <= (line or 0) <= (getattr(s, "end_lineno", 0) or 0)
        and any(n is node for n in ast.walk(s))
        for s in history.cells[number].body
    )
    return line if own else None
