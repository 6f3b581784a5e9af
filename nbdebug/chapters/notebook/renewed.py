"""Models that were made anew, or given a new part, while the optimizer keeps the parameters of before."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

from nbdebug.chapters.notebook.cells import Binding, History, nodes
from nbdebug.chapters.notebook.facts import NOWHERE, LeftBehind
from nbdebug.chapters.notebook.held import Held, held_by, parameters_of
from nbdebug.chapters.notebook.statements import dotted, names_in
from nbdebug.chapters.notebook.uses import At, root_of, same_thing, stepped
from nbdebug.finding import Where

ADDS = frozenset(
    {
        "add_module",
        "register_module",
        "register_parameter",
        "append",
        "extend",
        "insert",
        "setattr",
        "weight_norm",
        "spectral_norm",
        "register_parametrization",
        "load_state_dict",
    }
)
"""Calls that give a model parameters that it did not have."""


def left_behind(held: Held, history: History) -> list[LeftBehind]:
    """What each model trains and no optimizer holds, where a change after the optimizer was made is the reason."""
    found: list[LeftBehind] = []
    for name, model in [*held.whole, *held.weights]:
        missing, trained = held.missing(name, model)
        if missing:
            links = [_link(held, name, model, missing, trained, each, history) for each in held.optimizers]
            found += [link for link in links if link is not None][:1]
    return found


def _link(
    held: Held,
    name: str,
    model: Any,
    missing: list[tuple[str, Any]],
    trained: int,
    optimizer: tuple[str, Any],
    history: History,
) -> LeftBehind | None:
    """What has come between this model and this optimizer, if the two belong together."""
    called, thing = optimizer
    made = _made(history, called)
    own = {id(p) for _, p in parameters_of(model)}
    shares = any(id(p) in own for p in held_by(thing))
    meant = made is not None and root_of(name) in names_in(made.value)
    grads = any(p.grad is not None for _, p in missing)
    strangers = held.strangers(thing, inner=not (meant or shares or grads))
    if not strangers:
        how, changed = _added(name, missing, made, history) if shares and made is not None else ("", None)
    else:
        alike = not Counter(tuple(p.shape) for p in strangers) - Counter(tuple(p.shape) for _, p in missing)
        if not (meant or shares or alike and grads):
            return None
        how, changed = _changed(name, missing, shares, made, history)
        if changed is None and not grads:
            return None
    if not how:
        return None
    at, where = changed or ((0, 0), NOWHERE)
    used = grads or changed is not None and stepped(history, root_of(called), at) is not None
    return LeftBehind(
        name,
        called,
        tuple(path for path, _ in missing),
        trained,
        len(strangers),
        how,
        used,
        history.text(made) if made is not None else "",
        where,
        history.place(made) if made is not None else NOWHERE,
    )


def _made(history: History, optimizer: str) -> Binding | None:
    """The statement that made the optimizer."""
    bindings = history.bindings(root_of(optimizer), "assign")
    return bindings[-1] if bindings else None


def _changed(
    name: str, missing: list[tuple[str, Any]], part: bool, made: Binding | None, history: History
) -> tuple[str, tuple[At, Where] | None]:
    """The first statement behind the optimizer's that made the model anew, or replaced a part of it; and which."""
    since = made.at if made is not None else (0, 0)
    if part:
        found = _replaced(name, missing, since, history)
        if found is not None:
            return "part", found
    bindings = [b for b in history.bindings(root_of(name)) if b.at > since and not same_thing(b)]
    bindings = bindings if made is not None else bindings[-1:]
    if bindings:
        return "anew", (bindings[0].at, history.place(bindings[0]))
    found = _replaced(name, missing, since, history)
    return "part" if part or found is not None else "anew", found


def _replaced(name: str, missing: list[tuple[str, Any]], since: At, history: History) -> tuple[At, Where] | None:
    """The first statement behind `since` that gives the model one of the parts that the missing parameters lie in."""
    parts = {piece for path, _ in missing for piece in path.split(".")[1:]} | ADDS
    root = root_of(name)
    for number in [n for n in history.cells if n >= since[0]]:
        cell = history.cells[number]
        if not cell.says(root):
            continue
        for top in cell.statements:
            if (number, top.lineno) <= since or root not in {n.id for n in nodes([top]) if isinstance(n, ast.Name)}:
                continue
            if any(_gives(node, parts) for node in nodes([top, *_called_by(top, history, number)])):
                return (number, top.lineno), cell.place(top.lineno)
    return None


def _called_by(statement: ast.stmt, history: History, number: int) -> list[ast.AST]:
    """The functions of cells that the statement calls by name."""
    called = {dotted(n.func) for n in nodes([statement]) if isinstance(n, ast.Call)}
    return [f for f in history.reach(number) if isinstance(f, ast.FunctionDef) and f.name in called]


def _gives(node: ast.AST, parts: set[str]) -> bool:
    """Whether it sets one of these attributes, or an item, or calls what adds a part."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr in parts
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return True
    return isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ADDS


def _added(
    name: str, missing: list[tuple[str, Any]], made: Binding, history: History
) -> tuple[str, tuple[At, Where] | None]:
    """A part that was added, or unfrozen, after the optimizer was made from all that the model had then."""
    if "requires_grad" in history.text(made):
        thawing = history.leading_to("requires_grad", "requires_grad_")
        for number in [cell.number for cell in thawing if cell.number >= made.number]:
            for node in nodes(history.reach(number)):
                if _thaws(node) and (number > made.number or getattr(node, "lineno", 0) > made.node.lineno):
                    line = getattr(node, "lineno", 1)
                    return "unfrozen", ((number, line), history.cells[number].place(line))
    if f"{root_of(name)}.parameters()" not in history.text(made):
        return "", None
    found = _replaced(name, missing, made.at, history)
    return ("part", found) if found is not None else ("", None)


def _thaws(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is True:
        return any(isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in node.targets)
    if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "requires_grad_":
        return not node.args or isinstance(node.args[0], ast.Constant) and node.args[0].value is True
    return False
