"""Loaders, schedulers, trainers, wrappers: made from a variable that a later cell has replaced, and used since.

The holder keeps what it was given. It is told only where the new thing would do something else: a model or an optimizer
of its own, a function that says something else, a data set made by another statement or class.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.chapters.notebook.cells import Binding, History
from nbdebug.chapters.notebook.facts import StaleHolder
from nbdebug.chapters.notebook.held import is_module, is_optimizer, is_tensor, parameters_of
from nbdebug.chapters.notebook.statements import names_in
from nbdebug.chapters.notebook.uses import read, root_of, same_thing, stepped
from nbdebug.observe.named import attributes
from nbdebug.observe.saying import says

PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def stale_holders(names: Mapping[str, Any], met: list[tuple[str, Any]], history: History) -> list[StaleHolder]:
    """names: the user's own variables; met: what can be reached from them."""
    known = {id(value) for value in names.values()}
    found: dict[str, StaleHolder] = {}
    for holder, thing in names.items():
        if issubclass(type(thing), PLAIN) or is_tensor(thing) or is_optimizer(thing):
            continue
        parts = [(path, part) for path, part in _inside(holder, thing) if id(part) not in known]
        if not parts or not (bindings := history.bindings(holder, "assign")):
            continue
        made = bindings[-1]
        current = {id(part) for _, part in parts} | {id(part) for _, part in _inside(holder, thing)}
        for name in sorted(names_in(made.value) & names.keys() - {holder}):
            if id(names[name]) not in current and not _taken(names[name], thing, names):
                one = _left(holder, name, names[name], parts, made, history)
                if one is not None:
                    found.setdefault(holder, one)
    return list(found.values())


def _taken(new: Any, holder: Any, names: Mapping[str, Any]) -> bool:
    """Whether another variable of the holder's kind holds the new thing: the name was used for one after the other."""
    alike = [thing for thing in names.values() if type(thing) is type(holder) and thing is not holder]
    return any(part is new for thing in alike for _, part in _inside("", thing))


def _left(
    holder: str, name: str, new: Any, parts: list[tuple[str, Any]], made: Binding, history: History
) -> StaleHolder | None:
    since = [b for b in history.bindings(name) if b.at > made.at and not same_thing(b)]
    if not since:
        return None
    path = next((path for path, old in parts if _replaced(old, new, name, made, since[0], history)), None)
    if path is None:
        return None
    used = stepped(history, root_of(holder), since[0].at) or read(history, root_of(holder), since[0].at)
    if used is None:
        return None
    return StaleHolder(
        holder,
        path,
        name,
        "function" if type(new) is types.FunctionType else type(new).__name__,
        history.text(made),
        history.place(since[0]),
        history.place(made),
        used,
    )


def _replaced(old: Any, new: Any, name: str, made: Binding, since: Binding, history: History) -> bool:
    """Whether the new thing stands where the old one stood, and is another one in what it does."""
    if type(old) is types.FunctionType and type(new) is types.FunctionType:
        return (
            old.__code__.co_name == new.__code__.co_name
            and old.__globals__ is new.__globals__
            and (says(old.__code__) != says(new.__code__))
        )
    kind, new_kind = type(old), type(new)
    if (kind.__module__, kind.__qualname__) != (new_kind.__module__, new_kind.__qualname__):
        return False
    if is_module(old):
        return any(True for _ in parameters_of(old))
    if is_optimizer(old):
        return True
    before = [b for b in history.bindings(name) if b.at <= made.at]
    return (
        _is_dataset(new) and bool(before) and (history.text(before[-1]) != history.text(since) or kind is not new_kind)
    )


def _is_dataset(thing: Any) -> bool:
    """Something of a class with `__getitem__` and `__len__`, or that inherits from torch's Dataset."""
    kind = type(thing)
    return (
        any(parent.__module__.startswith("torch.utils.data") for parent in kind.__mro__)
        or all(
            any(name in type.__getattribute__(parent, "__dict__") for parent in kind.__mro__[:-1])
            for name in ("__getitem__", "__len__")
        )
        and kind.__module__ == "__main__"
    )


def _inside(holder: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """(path, thing) of what an object holds in its own attributes, of a module also its children."""
    found = dict(attributes(thing))
    found |= (found.pop("_modules", None) or {}) if is_module(thing) else {}
    for key, value in found.items():
        yield f"{holder}.{key}", value
        if key in ("lr_lambdas", "dataset", "transform", "transforms"):
            inner = enumerate(value) if type(value) in (list, tuple) else attributes(value).items()
            yield from ((f"{holder}.{key}.{sub}", part) for sub, part in inner)
