"""Hooks that a cell, run again, has registered once more; and which cell that was."""

from __future__ import annotations

import ast
from types import CodeType, FunctionType, MethodType
from typing import Any

from nbdebug.chapters.notebook.cells import History, nodes
from nbdebug.chapters.notebook.facts import NOWHERE, TwiceHook
from nbdebug.chapters.notebook.statements import dotted, names_in
from nbdebug.finding import Where
from nbdebug.observe.doubled import Doubled, doubled

METHODS = {
    "forward hook": ("register_forward_hook", "register_module_forward_hook"),
    "forward pre-hook": ("register_forward_pre_hook", "register_module_forward_pre_hook"),
    "backward hook": ("register_full_backward_hook", "register_backward_hook", "register_module_full_backward_hook"),
    "backward pre-hook": ("register_full_backward_pre_hook", "register_module_full_backward_pre_hook"),
    "state dict hook": ("register_state_dict_post_hook", "_register_state_dict_hook"),
    "state dict pre-hook": ("register_state_dict_pre_hook",),
    "load pre-hook": ("register_load_state_dict_pre_hook", "_register_load_state_dict_pre_hook"),
    "load hook": ("register_load_state_dict_post_hook",),
    "gradient hook": ("register_hook",),
    "gradient hook behind accumulation": ("register_post_accumulate_grad_hook",),
    "step pre-hook": ("register_step_pre_hook", "register_optimizer_step_pre_hook"),
    "step hook": ("register_step_post_hook", "register_optimizer_step_post_hook"),
}
"""The methods that register each kind of hook."""


def hooks_registered_twice(met: list[tuple[str, Any]], history: History) -> list[TwiceHook]:
    """One entry for each hook function, with all modules that have it more than once."""
    groups: dict[tuple[str, str, str], list[Doubled]] = {}
    for one in doubled(met):
        groups.setdefault((one.hook, one.word, one.code.co_filename), []).append(one)
    return [_told(group, history) for group in groups.values()]


def _told(group: list[Doubled], history: History) -> TwiceHook:
    first = group[0]
    times = max(len(one.older) for one in group) + 1
    cells, method = _registrations(first, times, history)
    places = [_place(history, number, method) for number in cells]
    where = places[1] if len(places) > 1 else places[0] if places else _source(first.code, history)
    return TwiceHook(
        tuple(dict.fromkeys(one.module for one in group)),
        first.hook,
        first.word,
        method,
        times,
        where,
        places[0] if len(places) > 1 else NOWHERE,
    )


def _registrations(one: Doubled, times: int, history: History) -> tuple[list[int], str]:
    """The cells that registered it, oldest first, and the method that they called."""
    methods = METHODS.get(one.word, ("register",))
    calling: dict[int, list[ast.Call]] = {}
    for number in [cell.number for cell in history.leading_to(*methods)]:
        calls = [
            n
            for n in nodes(history.reach(number))
            if isinstance(n, ast.Call)
            and dotted(n.func).rpartition(".")[2] in methods
            or isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr in methods
        ]
        if calls:
            calling[number] = calls
    own = [n for hook in (*[h for _, _, h in one.older], one.newest) for n in [history.cell_of(_code(hook))] if n]
    named = [n for n, calls in calling.items() if any(one.hook in _given(call) for call in calls)]
    method = next((_method(call) for calls in calling.values() for call in calls), methods[0])
    if len(set(own)) == times:  # each run of the cell has made a function of its own, and says where
        return sorted(own), method
    for cells in (named, [n for n in calling if own and n in history.same(own[-1])], list(calling)):
        if len(cells) >= min(2, times):
            return cells[-times:], _method(calling[cells[-1]][0])
    return list(calling)[-1:], method


def _given(call: ast.Call) -> set[str]:
    """The names in what a call is given, those of attributes (`self.save`) as well."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    attrs = {n.attr for value in values for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    return attrs.union(*(names_in(value) for value in values)) if values else attrs


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


def _code(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # of a functools.partial
    function = hook.__func__ if type(hook) is MethodType else hook
    return function.__code__.co_filename if type(function) is FunctionType else ""


def _place(history: History, number: int, method: str) -> Where:
    """The line of a cell that registers: the call itself, or that of the function which does."""
    cell = history.cells[number]
    lines = cell.typed.splitlines()
    line = next((n for n, text in enumerate(lines, 1) if method in text), None)
    own = {id(s) for s in cell.statements}
    if line is None:
        for root in history.reach(number):
            if id(root) in own and isinstance(root, (ast.Expr, ast.Assign)) and isinstance(root.value, ast.Call):
                line = root.lineno
                break
    return cell.place(line)


def _source(code: CodeType, history: History) -> Where:
    number = history.cell_of(code.co_filename)
    return (
        history.cells[number].place(code.co_firstlineno)
        if number is not None
        else Where(file=code.co_filename, line=code.co_firstlineno)
    )
