"""The user's variables and what lies in them, by the names that a person would write: `trainer.history[3]["loss"]`.

Only exact lists, tuples, dicts, sets and deques are opened, and the attributes that an object has of its own; nothing
of the user's runs. What lies nearest to a variable comes first, so a thing has its shortest name.
"""

from __future__ import annotations

import collections
import functools
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

DEPTH = 5
MOST_OBJECTS = 200_000
"""Things looked at; more than that lie in a data set, not in a record of a training."""
SHELL_NAMES = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[oid]h|In|Out|exit|quit|get_ipython|open|__\w+__")
"""The names under which a shell keeps its own things among the user's."""
CONTAINERS = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    types.SimpleNamespace,
)
_LEAVES = frozenset({str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.nn.Parameter})
_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.Tensor,
)
_OTHERS = frozenset(
    {"torch", "numpy", "pandas", "IPython", "ipykernel", "matplotlib", "traitlets", "nbdebug", *sys.stdlib_module_names}
)
MODULES_OWN = frozenset(vars(torch.nn.Module()))


def user_variables(names: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own among them, without what the shell keeps there."""
    return {name: value for name, value in names.items() if isinstance(name, str) and not SHELL_NAMES.fullmatch(name)}


def frame_variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that runs, or whose traceback is kept; {} of a frame that is no function's."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    given = frame.f_locals
    names = dict(given)
    if type(given) is dict:  # up to Python 3.12 the frame keeps this copy, which would outlive the variables
        given.clear()
    return names


def reachable_objects(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, thing) of what can be reached by name, each once, nearest first, without plain values and tensors."""
    level = [(name, thing) for name, thing in user_variables(names).items() if type(thing) not in _LEAVES]
    seen: set[int] = {id(names)}
    for _ in range(DEPTH):
        following: list[tuple[str, Any]] = []
        for name, thing in level:
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            yield name, thing
            if len(seen) + len(following) < MOST_OBJECTS:
                following += children(name, thing)
        level = following


def children(name: str, thing: Any) -> Iterable[tuple[str, Any]]:
    """The names and values one level below, without plain values and tensors."""
    kind = type(thing)
    if kind in (list, tuple, collections.deque):
        return [(f"{name}[{i}]", value) for i, value in enumerate(thing) if type(value) not in _LEAVES]
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return [(f"{name}[{key_text(key)}]", value) for key, value in thing.items() if type(value) not in _LEAVES]
    if kind in (set, frozenset):
        return [(f"an item of {name}", value) for value in thing if type(value) not in _LEAVES]
    if issubclass(kind, _PLAIN):
        return ()
    if issubclass(kind, types.FunctionType):
        return [
            (f"{name}.{var}", cell.cell_contents)
            for var, cell in zip(thing.__code__.co_freevars, thing.__closure__ or ())
            if cell_has_value(cell)
        ]
    if issubclass(kind, types.MethodType):
        return [(f"{name}.__self__", thing.__self__)]
    found = attributes(thing)
    if issubclass(kind, torch.nn.Module):
        children = found.get("_modules") or {}
        return [
            (f"{name}.{key}", value)
            for key, value in [*children.items(), *found.items()]
            if key not in MODULES_OWN and type(value) not in _LEAVES
        ]
    package = str(type.__getattribute__(kind, "__module__")).partition(".")[0]
    if package in _OTHERS and kind is not types.SimpleNamespace:
        return ()
    return [(f"{name}.{key}", value) for key, value in found.items() if type(value) not in _LEAVES]


def cell_has_value(cell: Any) -> bool:
    """Whether the variable of a closure has been given a value yet."""
    try:
        cell.cell_contents  # noqa: B018 (asked for its ValueError)
    except ValueError:
        return False
    return True


def attributes(thing: Any) -> dict[str, Any]:
    """The attributes that lie in the object itself, read past any property or `__getattr__` of its class."""
    found: dict[str, Any] = {}
    for parent in type(thing).__mro__:
        given: Any = parent.__dict__.get("__dict__")
        if type(given) in (types.GetSetDescriptorType, types.MemberDescriptorType):  # the latter: SimpleNamespace
            found |= {key: value for key, value in given.__get__(thing).items() if isinstance(key, str)}
        for name, slot in parent.__dict__.items():
            if type(slot) is types.MemberDescriptorType and not name.startswith("__"):
                try:
                    found[name] = slot.__get__(thing)
                except AttributeError:  # never set
                    continue
    return found


def key_text(key: Any) -> str:
    """A key as it is written, where that runs no code of the user's."""
    plain = (
        type(key) in (str, int, float, bool, type(None))
        or type(key) is tuple
        and all(type(part) in (str, int, float, bool, type(None)) for part in key)
    )
    text = repr(key) if plain else f"a {type(key).__name__}"
    return text if len(text) < 60 else text[:57] + "..."


def is_user_module(module: str) -> bool:
    """Whether a module of this name is a file, or a notebook, of the user's own."""
    return module == "__main__" or _in_users_file(module, getattr(sys.modules.get(module), "__file__", None))


@functools.cache
def _in_users_file(module: str, file: Any) -> bool:
    top = module.partition(".")[0]
    if not top or top in sys.stdlib_module_names or top in ("nbdebug", "torch"):
        return False
    return isinstance(file, str) and not re.search(r"[\\/](site|dist)-packages[\\/]", file)
