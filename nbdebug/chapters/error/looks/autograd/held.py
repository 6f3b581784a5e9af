"""What the user's objects are made of, read from where it lies: no method, property or hook of theirs is asked."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.chapters.error.operands import UNKNOWN


def plain(function: Any) -> Any:
    """The function within its wrappers, as `functools.wraps` and bound methods keep it."""
    for _ in range(20):
        if type(function) is types.MethodType or type(function) in (staticmethod, classmethod):
            function = function.__func__
        elif type(function) is types.FunctionType and "__wrapped__" in function.__dict__:
            function = function.__dict__["__wrapped__"]
        else:
            break
    return function


def method(thing: Any, name: str) -> Any:
    """A function of an object's class, or UNKNOWN."""
    return next((vars(kind)[name] for kind in type(thing).__mro__ if name in vars(kind)), UNKNOWN)


def is_module(thing: Any) -> bool:
    return issubclass(type(thing), torch.nn.Module)


_LIES = torch.nn.Module.__dict__["__dict__"]
"""Gives a module's own attributes, past whatever its class makes of `__dict__` or `__getattr__`."""


def children(module: Any) -> dict[str, Any]:
    """The modules directly within one, by their names there."""
    return {name: child for name, child in (_LIES.__get__(module).get("_modules") or {}).items() if child is not None}


def modules(model: Any) -> Iterator[Any]:
    """A module and all within it, each once, read from where they lie."""
    todo, seen = [model], set()
    while todo:
        one = todo.pop(0)
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += children(one).values()


def package(thing: Any) -> str:
    """The module in which an object's class was made."""
    return str(type.__getattribute__(type(thing), "__module__"))


def parameters(module: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(dotted name, parameter) of a module, read from where they lie: a `parameters` of the user's is not asked."""
    for name, found in (_LIES.__get__(module).get("_parameters") or {}).items():
        if found is not None:
            yield path + name, found
    for name, child in children(module).items() if depth < 50 else ():
        yield from parameters(child, f"{path}{name}.", depth + 1)
