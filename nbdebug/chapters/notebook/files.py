"""Modules that are loaded in another version than their file now has, and the cell that brought the old one in."""

from __future__ import annotations

import ast
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nbdebug.chapters.notebook.cells import Cell, History, nodes
from nbdebug.chapters.notebook.facts import NOWHERE, StaleModule
from nbdebug.chapters.notebook.loaded import Edited, edited
from nbdebug.chapters.notebook.statements import dotted
from nbdebug.finding import Where
from nbdebug.observe.named import is_users, own

WRITES = re.compile(
    r"%%writefile|write_text|write_bytes|\.write\(|writelines|open\(|sed -i|copyfile|copy2?\("
    r"|>\s*\S+\.py"
)
"""What a cell says that writes a file."""


class Import(NamedTuple):
    """A statement that imports a module, or reloads it."""

    number: int
    node: ast.AST
    text: str
    reload: bool


def stale_modules(names: Mapping[str, Any], history: History, since: float) -> tuple[list[StaleModule], list[str]]:
    """The modules whose file has changed since they were loaded, and files that can't be read now. since: when the
    process began."""
    found: list[StaleModule] = []
    modules, broken = edited(since)
    for one in modules:
        if one.changed:
            found.append(_module(one, history))
        else:
            left = list(dict.fromkeys(_left(one, names)))
            if left:
                found.append(_names(one, left, history))
    return found, broken


def _module(one: Edited, history: History) -> StaleModule:
    imports = list(_imports(one.name, history))
    wrote = _written(os.path.basename(one.file), history, imports[0].number if imports else 0)
    since = [i for i in imports if wrote is None or i.number > wrote.number]
    chosen = (since[0] if wrote is not None else since[-1]) if since else None
    again = chosen is not None and chosen is not imports[0]
    where = _place(chosen, history)
    if chosen is None and wrote is not None:
        where = wrote.place(*_line_of(wrote, os.path.basename(one.file)))
    return StaleModule(
        one.name,
        os.path.basename(one.file),
        tuple(one.changed),
        (),
        _again(one.name, imports),
        where,
        _place(imports[0] if imports else None, history),
        again,
        wrote.place() if wrote is not None else NOWHERE,
    )


def _names(one: Edited, left: list[tuple[str, str]], history: History) -> StaleModule:
    """The module is new, and the notebook still holds the old functions."""
    imports = list(_imports(one.name, history))
    reloads = [i for i in imports if i.reload]
    chosen = reloads[-1] if reloads else imports[-1] if imports else None
    changed = tuple(dict.fromkeys(function for _, function in left))
    return StaleModule(
        one.name,
        os.path.basename(one.file),
        changed,
        tuple(dict.fromkeys(name for name, _ in left)),
        _again(one.name, imports),
        _place(chosen, history),
        _place(imports[0] if imports else None, history),
        bool(reloads),
    )


def _left(one: Edited, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(where it is held, function) of old functions and classes that the notebook, or another module, still holds."""
    spaces = [("", own(names))] + [
        (f"{name}.", vars(module))
        for name, module in list(sys.modules.items())
        if type(module) is types.ModuleType and name not in ("__main__", one.name) and is_users(name)
    ]
    for prefix, space in spaces:
        for name, thing in list(space.items()):
            kind = type(thing)
            if (
                kind is types.FunctionType
                or issubclass(kind, type)
                and (type.__getattribute__(thing, "__module__") == one.name)
            ):
                if kind is not types.FunctionType and thing is vars(one.module).get(name):
                    continue
                yield from ((f"{prefix}{name}", function) for function in one.old(thing, name))


def _imports(module: str, history: History) -> Iterator[Import]:
    """The statements that import the module or reload it, in the order in which they ran."""
    last = module.rpartition(".")[2]
    for cell in history.leading_to(last):
        for node in nodes(history.reach(cell.number)):
            if isinstance(node, ast.Import):
                if any(alias.name == module or alias.name.startswith(f"{module}.") for alias in node.names):
                    yield Import(cell.number, node, ast.unparse(node), False)
            elif isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == module or module in whole or (node.module or "").startswith(f"{module}."):
                    yield Import(cell.number, node, ast.unparse(node), False)
            elif (
                isinstance(node, ast.Call)
                and dotted(node.func).rpartition(".")[2] == "reload"
                and node.args
                and (dotted(node.args[0]).rpartition(".")[2] in (last, *_aliases(module, history)))
            ):
                yield Import(cell.number, node, ast.unparse(node), True)


def _aliases(module: str, history: History) -> set[str]:
    """The names that the notebook has given to the module: `import losses as L`."""
    last = module.rpartition(".")[2]
    return {
        alias.asname
        for cell in history.saying(last)
        for s in cell.statements
        if isinstance(s, (ast.Import, ast.ImportFrom))
        for alias in s.names
        if alias.asname and alias.name.rpartition(".")[2] == last
    }


def _again(module: str, imports: list[Import]) -> str:
    """What to write to get the new version: a reload, then the notebook's own `from … import`."""
    froms = [i.text for i in imports if isinstance(i.node, ast.ImportFrom) and i.node.module == module]
    return "\n".join([f"import importlib, {module}", f"importlib.reload({module})", *dict.fromkeys(froms)])


def _written(file: str, history: History, after: int) -> Cell | None:
    """The last cell behind the first import that writes the file, as far as its text tells."""
    holders = {
        b.path
        for cell in history.saying(file)
        for b in cell.bindings
        if b.value is not None and file in ast.unparse(b.value)
    }
    words = [re.escape(file), *(rf"(?<![\w.]){re.escape(name)}(?!\w)" for name in holders)]
    named = re.compile("|".join(words))
    wrote = [
        cell
        for cell in history.saying(file, *holders)
        if cell.number > after and any(named.search(line) and WRITES.search(line) for line in _whole(cell))
    ]
    return wrote[-1] if wrote else None


def _whole(cell: Cell) -> Iterator[str]:
    """The statements of a cell as text; as it was typed where it is none of Python."""
    if cell.typed.lstrip().startswith("%%") or not cell.body:
        yield cell.typed
    yield from (cell.text_of(statement) for statement in cell.statements)


def _line_of(cell: Cell, file: str) -> tuple[int, None]:
    return next((n for n, line in enumerate(cell.typed.splitlines(), 1) if file in line), 1), None


def _place(imported: Import | None, history: History) -> Where:
    if imported is None:
        return NOWHERE
    line = getattr(imported.node, "lineno", 1)
    return history.cells[imported.number].place(line, imported.text)
