"""The user's variables and the objects in them, by the names that a person would write: `trainer.history[3]["loss"]`.

Only exact lists, tuples, dicts, sets and deques are searched, and an object's own attributes; none of the user's code
runs. The search goes level by level, so an object gets its shortest name.

What else the IPython shell keeps: of outputs `Out`, `_`, `__`, `___`, `_7`, a hidden copy of these names, the display
hook's own three and the result of the last cell; of errors `sys.last_value` and its like, the traceback that `%debug`
starts from, the debugger itself, and the result of the last cell. `del`, `%reset -f out` and `gc.collect()` leave most
of these references in place. Nothing here imports IPython.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import glob
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import FrameType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from nbdebug.text import clip

DEPTH = 5
MOST_OBJECTS = 200_000
"""Objects visited at most; more than that are in a data set, not in the records of a training."""
SHELL_NAMES = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[oid]h|In|Out|exit|quit|get_ipython|open|__\w+__")
"""The names of the shell's own variables among the user's."""
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
SCALARS = (str, bytes, int, float, complex, bool, type(None))
ATOMS: tuple[type, ...] = (*SCALARS, range, slice, type(Ellipsis), types.CodeType, types.BuiltinFunctionType)
ATOMS += (torch.dtype, torch.device, torch.Size)
"""Types whose values lead to nothing."""
_LEAVES = frozenset({*SCALARS, torch.Tensor, torch.nn.Parameter})
_PLAIN = (*SCALARS, type, types.ModuleType, types.BuiltinFunctionType, torch.Tensor)
LIBRARIES = frozenset(
    {"torch", "numpy", "pandas", "IPython", "ipykernel", "matplotlib", "traitlets", "nbdebug", *sys.stdlib_module_names}
)
MODULES_OWN = frozenset(vars(torch.nn.Module()))


def user_variables(names: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own variables among these names, without the shell's."""
    return {name: value for name, value in names.items() if isinstance(name, str) and not SHELL_NAMES.fullmatch(name)}


def frame_variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame; {} for a frame that is no function's."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    local = frame.f_locals
    names = dict(local)
    if type(local) is dict:  # up to Python 3.12 the frame keeps this copy, which would outlive the variables
        local.clear()
    return names


def reachable_objects(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, object) of all objects reachable by name, each once, nearest first, without plain values and tensors."""
    level = [(name, thing) for name, thing in user_variables(names).items() if type(thing) not in _LEAVES]
    visited: set[int] = {id(names)}
    for _ in range(DEPTH):
        following: list[tuple[str, Any]] = []
        for name, thing in level:
            if id(thing) in visited:
                continue
            visited.add(id(thing))
            yield name, thing
            if len(visited) + len(following) < MOST_OBJECTS:
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
    if issubclass(kind, FunctionType):
        return [(f"{name}.{variable}", value) for variable, value in closure_variables(thing).items()]
    if issubclass(kind, types.MethodType):
        return [(f"{name}.__self__", thing.__self__)]
    values = attributes(thing)
    if issubclass(kind, torch.nn.Module):
        return [
            (f"{name}.{key}", value)
            for key, value in [*registered(thing, "_modules").items(), *values.items()]
            if key not in MODULES_OWN and type(value) not in _LEAVES
        ]
    package = str(type.__getattribute__(kind, "__module__")).partition(".")[0]
    if package in LIBRARIES and kind is not types.SimpleNamespace:
        return ()
    return [(f"{name}.{key}", value) for key, value in values.items() if type(value) not in _LEAVES]


def closure_variables(function: FunctionType) -> dict[str, Any]:
    """The variables that a function shares with the one around it, without those that have no value yet."""
    result: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):
            result[name] = cell.cell_contents
    return result


def class_attribute(thing: Any, name: str, default: Any = None) -> Any:
    """What the class of an object, or a base of it, has under a name: a function, not a bound method."""
    for parent in type.__getattribute__(type(thing), "__mro__"):
        namespace = type.__getattribute__(parent, "__dict__")
        if name in namespace:
            return namespace[name]
    return default


def attributes(thing: Any) -> dict[str, Any]:
    """The attributes in the object itself: no property, `__getattr__`, metaclass or subclass of dict is asked.
    Of a class, its own namespace."""
    kind = type(thing)
    mro = type.__getattribute__(kind, "__mro__")
    at, slots = _layout(kind, mro)
    values: dict[str, Any] = {}
    if at is not None:
        own: Any = type.__getattribute__(mro[at], "__dict__")["__dict__"].__get__(thing)
        items = dict.items(own) if issubclass(type(own), dict) else own.items()  # the latter: of a class
        values = {name: value for name, value in list(items) if type(name) is str}
    for i, name in slots:
        with contextlib.suppress(AttributeError):  # never set
            values[name] = type.__getattribute__(mro[i], "__dict__")[name].__get__(thing)
    return values


HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was made by a class statement, or might have been."""
_layouts: dict[int, tuple[weakref.ref[type], tuple[int | None, tuple[tuple[int, str], ...]]]] = {}
"""By the id of a class; no entry keeps a class alive, or asks its metaclass for a hash."""


def _layout(kind: type, mro: tuple[type, ...]) -> tuple[int | None, tuple[tuple[int, str], ...]]:
    """Where instances of a class keep their attributes: the number, in the order of its bases, of the class that gives
    their dict, and (number, name) of each slot."""
    known = _layouts.get(id(kind))
    if known is not None and known[0]() is kind:
        return known[1]
    at, slots = None, dict[str, int]()
    for i, parent in enumerate(mro):
        namespace = type.__getattribute__(parent, "__dict__")
        if at is None and type(namespace.get("__dict__")) in (GetSetDescriptorType, MemberDescriptorType):
            at = i  # the latter: of SimpleNamespace and modules
        if type.__getattribute__(parent, "__flags__") & HEAP_TYPE:
            for name, slot in namespace.items():
                if type(slot) is MemberDescriptorType and not name.startswith("__"):
                    slots.setdefault(name, i)
    layout = at, tuple((i, name) for name, i in slots.items())
    if len(_layouts) > 4096:
        _layouts.clear()
    _layouts[id(kind)] = weakref.ref(kind), layout
    return layout


def registered(module: torch.nn.Module, table: str) -> dict[str, Any]:
    """What a module has in `_parameters`, `_buffers` or `_modules`, without what is None there."""
    inside: Any = attributes(module).get(table)
    if not issubclass(type(inside), dict):
        return {}
    return {name: value for name, value in list(dict.items(inside)) if type(name) is str and value is not None}


def members(thing: Any) -> dict[str, Any]:
    """The attributes of an object; of a module its parameters, buffers and children, too."""
    values = attributes(thing)
    if issubclass(type(thing), torch.nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            values |= registered(thing, table)
    return values


def named_children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """As the module's own method gives them, which may be the user's and is not asked; so the next two."""
    return {n: child for n, child in registered(module, "_modules").items() if issubclass(type(child), torch.nn.Module)}


def named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(dotted name, module) of a model and all within it, each once, outer ones first."""
    todo = [("", model)]
    visited: set[int] = set()
    while todo:
        path, module = todo.pop()
        if id(module) not in visited:
            visited.add(id(module))
            yield path, module
            inside = named_children(module)
            todo += [(f"{path}.{name}" if path else name, child) for name, child in reversed(inside.items())]


def named_parameters(model: torch.nn.Module, *, buffers: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, parameter) of a model, each once; with its buffers where these are asked for."""
    visited: set[int] = set()
    for path, module in named_modules(model):
        for table in ("_parameters", "_buffers")[: 1 + buffers]:
            for name, value in registered(module, table).items():
                if issubclass(type(value), torch.Tensor) and id(value) not in visited:
                    visited.add(id(value))
                    yield f"{path}.{name}" if path else name, value


def key_text(key: Any) -> str:
    """A key as it is written, where that runs no code of the user's."""
    plain = (
        type(key) in (str, int, float, bool, type(None))
        or type(key) is tuple
        and all(type(part) in (str, int, float, bool, type(None)) for part in key)
    )
    return clip(repr(key) if plain else f"a {type(key).__name__}", 60)


def is_user_module(module: str) -> bool:
    """Whether a module of this name is a file, or a notebook, of the user's own."""
    loaded = sys.modules.get(module)
    space = ModuleType.__getattribute__(loaded, "__dict__") if isinstance(loaded, ModuleType) else {}
    return module == "__main__" or _in_users_file(module, space.get("__file__"))


@functools.cache
def _in_users_file(module: str, file: Any) -> bool:
    top = module.partition(".")[0]
    if not top or top in sys.stdlib_module_names or top in ("nbdebug", "torch"):
        return False
    return isinstance(file, str) and not is_packages_file(file)


def is_packages_file(file: str) -> bool:
    """Whether an installed package has this file: it lies where Python installs them, or in a folder of Python's path
    with packages' metadata in it, as `pip install --target` makes it, if it is not where the user works."""
    return bool(re.search(r"[\\/](site|dist)-packages[\\/]", file)) or file.startswith(_targets(tuple(sys.path)))


@functools.lru_cache(maxsize=1)
def _targets(folders: tuple[str, ...]) -> tuple[str, ...]:
    own = {"", os.getcwd(), os.path.dirname(os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or ""))}
    others = [folder for folder in folders if folder not in own]
    return tuple(os.path.join(f, "") for f in others if glob.glob(os.path.join(glob.escape(f), "*.dist-info")))


def class_holders(name: str) -> tuple[str, ...]:
    """The user's modules that have a class of this name, at most five, the latest import, the likeliest, first."""
    names = []
    for module_name, module in reversed(list(sys.modules.items())):
        if type(module) is ModuleType and name and "." not in name:
            space = vars(module)
            made = space.get("__file__") is None and space.get("__spec__") is None  # without a file, and not Python's
            users = module_name == "__main__" or is_user_module(module_name) or made
            if isinstance(space.get(name), type) and users:
                names.append(module_name)
    return tuple(names[:5])


def module_spec(module: str) -> Any:
    """The module where it is loaded, else how it would be found; None where it can't be. Nothing is imported for it."""
    if module in sys.modules:
        return sys.modules[module]
    try:
        if "." not in module:
            return importlib.util.find_spec(module)
        parent = module_spec(module.rpartition(".")[0])
        path = getattr(parent, "__path__", None) or getattr(parent, "submodule_search_locations", None)
        return importlib.machinery.PathFinder.find_spec(module, path) if path else None
    except (ImportError, ValueError):  # no name of a module
        return None


LAST_ERROR_NAMES = ("last_value", "last_exc", "last_traceback", "last_type")
UNDERSCORES = re.compile(r"_{1,3}|_\d+")


@dataclasses.dataclass(frozen=True)
class ShellPlace:
    """One reference that the shell keeps. name: for reports; get: its value now, or None; clear: drop it."""

    name: str
    get: Callable[[], Any]
    clear: Callable[[], Any]


def running_shell() -> Any:
    """The running IPython shell, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


@dataclasses.dataclass(frozen=True)
class ShellPlaces:
    """All references of one shell. shell: None in a script; names: the user's variables."""

    shell: Any
    names: Mapping[str, Any]

    @property
    def namespaces(self) -> list[MutableMapping[str, Any]]:
        """The namespaces that hold the underscore names: the user's, and a hidden copy."""
        spaces = [self.names, getattr(self.shell, "user_ns", None), getattr(self.shell, "user_ns_hidden", None)]
        return list({id(s): s for s in spaces if isinstance(s, MutableMapping)}.values())

    @property
    def outputs(self) -> dict[Any, Any]:
        """The dict `Out` itself: outputs by the cell's number."""
        for space in self.namespaces:
            for name in ("_oh", "Out"):
                if isinstance(space.get(name), dict):
                    return space[name]
        return {}

    def displayed(self) -> list[tuple[str, Any, tuple[str, ...]]]:
        """(name, value, all its names) of each displayed value that the shell still references."""
        entries: dict[int, tuple[str, Any, list[str]]] = {}
        for number, value in list(self.outputs.items()):
            entry = entries.setdefault(id(value), (f"Out[{number}]", value, []))
            entry[2].append(f"Out[{number}]")
        for place in self._underscores():
            value = place.get()
            if value is not None and not isinstance(value, str) and value is not self.outputs:
                entry = entries.setdefault(id(value), (place.name, value, []))
                entry[2].append(place.name)
        return [(name, value, tuple(dict.fromkeys(also))) for name, value, also in entries.values()]

    def forget(self, value: Any) -> None:
        """Drop every reference to this output."""
        for number in [n for n, v in self.outputs.items() if v is value]:
            del self.outputs[number]
        for place in self._underscores():
            if place.get() is value:
                place.clear()

    def _underscores(self) -> list[ShellPlace]:
        places = []
        for space in self.namespaces:
            for name in [n for n in space if isinstance(n, str) and UNDERSCORES.fullmatch(n)]:
                places.append(_underscore(space, name))
        hook = getattr(self.shell, "displayhook", None)
        for name in ("_", "__", "___") if hook is not None else ():
            places.append(_attribute(name, hook, name, ""))
        last = getattr(self.shell, "last_execution_result", None)
        if last is not None:
            places.append(_attribute("the last cell's result", last, "result"))
        return places

    def errors(self) -> list[ShellPlace]:
        """The references to the last error that are set."""
        places = [
            dataclasses.replace(_attribute(f"sys.{name}", sys, name), clear=functools.partial(delattr, sys, name))
            for name in LAST_ERROR_NAMES[:3]
        ]
        for handler in ("InteractiveTB", "SyntaxTB"):
            holder = getattr(self.shell, handler, None)
            places += [
                _attribute(title, holder, name)
                for name, title in (
                    ("tb", "what %debug starts from"),
                    ("pdb", "the debugger"),
                    ("last_syntax_error", "the last syntax error"),
                )
                if holder is not None
            ]
        last = getattr(self.shell, "last_execution_result", None)
        if last is not None:
            places.append(_attribute("the last cell's result", last, "error_in_exec"))
        return [place for place in places if place.get() is not None]


def last_error() -> BaseException | None:
    """The exception that ended the last failing cell, if Python still references it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _underscore(space: MutableMapping[str, Any], name: str) -> ShellPlace:
    """A name such as `_7`, which `clear` removes; `_`, `__` and `___` are set to an empty text."""
    empty = set(name) == {"_"}
    return ShellPlace(
        name, lambda: space.get(name), lambda: space.__setitem__(name, "") if empty else space.pop(name, None)
    )


def _attribute(title: str, holder: Any, name: str, empty: Any = None) -> ShellPlace:
    """An attribute, which `clear` sets to `empty`."""
    return ShellPlace(title, lambda: getattr(holder, name, None), lambda: setattr(holder, name, empty))
