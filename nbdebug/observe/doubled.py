"""Hooks that a cell, run a second time, has registered once more on the same module.

Two hooks of one module are the same one twice when it is the same function, or a function made anew from the same code
that holds nothing different: closures over other names or numbers are meant to be there side by side. A method of
another object of the same class is a second registration when nothing of the user's leads to the older object.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbdebug.observe.named import attributes, cell_filled, is_users

TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
WORDS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook", "_backward_hooks": "backward hook",
         "_backward_pre_hooks": "backward pre-hook", "_state_dict_hooks": "state dict hook"}
_SIMPLE = (str, int, float, bool, bytes, type(None))


@dataclasses.dataclass
class Doubled:
    """A module's hook that was registered several times. module: its name; hook: of the function; older: (table, key,
    hook) of all but the newest."""

    module: str
    hook: str
    word: str
    code: types.CodeType
    older: list[tuple[dict[int, Any], int, Any]]

    def remove(self) -> None:
        """Take away all but the newest, as their handles would."""
        for table, key, hook in self.older:
            if table.get(key) is hook:
                del table[key]


    @property
    def gone(self) -> list[Any]:
        """The hooks that would not be there any more."""
        newest = list(self.older[0][0].values())
        return [hook for _, _, hook in self.older if sum(h is hook for h in newest) == 1]


def doubled(met: list[tuple[str, Any]]) -> list[Doubled]:
    """The hooks that are there more than once on a module. met: the user's things by name."""
    seen, done, found = {id(thing) for _, thing in met}, set(), []
    todo = [(name, thing) for name, thing in met if issubclass(type(thing), nn.Module)]
    while todo:
        name, module = todo.pop(0)
        if id(module) not in done:
            done.add(id(module))
            inside = attributes(module)
            found += list(_of(name, inside, seen))
            todo += [(f"{name}.{key}", child) for key, child in (inside.get("_modules") or {}).items()
                     if child is not None]
    return found


def _of(name: str, module: dict[str, Any], seen: set[int]) -> Iterator[Doubled]:
    """Of one module, given by its attributes. seen: ids of what the user's variables lead to by name."""
    for table_name in TABLES:
        table = module.get(table_name) or {}
        groups: list[list[tuple[int, Any]]] = []
        for key, hook in table.items():
            if _code(hook) is None:
                continue
            group = next((g for g in groups if _same(g[-1][1], hook, seen)), None)
            if group is None:
                groups.append(group := [])
            group.append((key, hook))
        for group in groups:
            if len(group) > 1:
                code = _code(group[0][1])
                assert code is not None
                yield Doubled(name, code.co_name, WORDS[table_name], code, [(table, k, h) for k, h in group[:-1]])


def _code(hook: Any) -> types.CodeType | None:
    """The code of the user's own function behind a hook."""
    if type(hook) is functools.partial:
        return _code(hook.func)
    function = hook.__func__ if type(hook) is types.MethodType else hook
    if type(function) is not types.FunctionType or not is_users(str(function.__module__)):
        return None
    return function.__code__


def _same(old: Any, new: Any, seen: set[int]) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or _text(_code(old)) != _text(_code(new)):
        return False
    if type(old) is functools.partial:
        return old.args == new.args and old.keywords == new.keywords if _simple(old) and _simple(new) else False
    if type(old) is types.MethodType:
        return old.__self__ is new.__self__ or id(old.__self__) not in seen
    pairs = zip(_cells(old), _cells(new))
    return all(a == b if type(a) in _SIMPLE or type(b) in _SIMPLE else type(a) is type(b) for a, b in pairs)


def _text(code: types.CodeType | None) -> tuple[Any, ...]:
    """What a function says, wherever in the cell it stands."""
    if code is None:
        return ()
    return (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars,
            tuple(_text(c) if isinstance(c, types.CodeType) else (type(c), c) for c in code.co_consts))


def _simple(hook: functools.partial[Any]) -> bool:
    return all(type(value) in _SIMPLE for value in (*hook.args, *hook.keywords.values()))


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function carries along: its closure and its defaults (`lambda …, name=name: …`)."""
    closed = [cell.cell_contents for cell in function.__closure__ or () if cell_filled(cell)]
    return [*closed, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
