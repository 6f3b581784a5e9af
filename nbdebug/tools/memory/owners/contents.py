"""What lies inside an object, read without running any of the user's code.

No property, `__getattr__`, `__iter__` or `__repr__` runs: attributes are read from where they lie, a subclass of a dict
is read as the dict that it is, and what Python gives no access to comes from the garbage collector.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nbdebug.observe.variables import HEAP_TYPE, attributes, closure_variables, frame_variables, key_text

ATOMS = frozenset(
    {
        str,
        bytes,
        bytearray,
        int,
        float,
        complex,
        bool,
        type(None),
        range,
        slice,
        type(Ellipsis),
        types.CodeType,
        types.BuiltinFunctionType,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
    }
)
"""Kinds that hold no memory worth naming."""
CROWD = 20_000
"""Of a container with more members than this, a data set, only tensors and arrays are opened from there on."""
CLOSURE = "closure"
HOOK = "the hook "
"""With this the name of a hook begins."""
CACHE = functools._lru_cache_wrapper


class Content(NamedTuple):
    """What lies inside. path: what to write behind the name of the whole; kind: one of facts.KINDS where it differs
    from that of the whole, else "". Where the whole is no part of the name, head and tail are what stands before and
    behind what is written further: "acts" and " in the closure of `step`"."""

    path: str
    value: Any
    kind: str = ""
    head: str = ""
    tail: str = ""


def parts(thing: Any, name: str) -> Iterable[Content]:
    """The parts of an object that is no tensor, no module and no exception."""
    kind = type(thing)
    if issubclass(kind, dict):
        return _of_dict(thing, name)
    if issubclass(kind, (list, tuple, collections.deque)):
        return _of_sequence(thing, kind)
    if issubclass(kind, (set, frozenset)):
        base = set if issubclass(kind, set) else frozenset
        return [
            Content("", value, "", "an item", f" of `{name}`")
            for number, value in enumerate(base.__iter__(thing))
            if type(value) not in ATOMS and (number < CROWD or _is_leaf(type(value)))
        ]
    if kind is types.FunctionType:
        return of_function(thing, name)
    if kind is types.MethodType:
        return [Content(".__self__", thing.__self__), Content("", thing.__func__)]
    if kind is types.GeneratorType or kind is types.CoroutineType:
        frame = thing.gi_frame if kind is types.GeneratorType else thing.cr_frame
        return (
            []
            if frame is None
            else [Content("", value, "", key, f" in {name}") for key, value in variables(frame).items()]
        )
    if kind is CACHE:
        return _of_cache(thing, name)
    if issubclass(kind, type):
        return _of_class(thing)
    values = attributes(thing)
    own = [Content(f".{key}", value) for key, value in values.items() if type(value) not in ATOMS]
    return own if values or type.__getattribute__(kind, "__flags__") & HEAP_TYPE else _inside(thing, name)


def of_function(function: Any, name: str) -> Iterator[Content]:
    """The variables of its closure, its defaults, and what hangs on it."""
    code = function.__code__
    behind = f" in {name}" if name.startswith(HOOK) else f" in the closure of `{name}`"
    for variable, value in closure_variables(function).items():
        if type(value) not in ATOMS:
            yield Content("", value, CLOSURE, variable, behind)
    positional = function.__defaults__ or ()
    defaults = dict(zip(code.co_varnames[code.co_argcount - len(positional) : code.co_argcount], positional))
    for variable, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
        if type(value) not in ATOMS:
            yield Content("", value, "", variable, f", a default of `{name}`")
    yield from (
        Content(f".{key}", value)
        for key, value in function.__dict__.items()
        if key != "__wrapped__" and type(value) not in ATOMS
    )
    if "__wrapped__" in function.__dict__:
        yield Content("", function.__dict__["__wrapped__"])


def variables(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a function's frame; {} of a frame that is no function's."""
    return {name: value for name, value in frame_variables(frame).items() if type(value) not in ATOMS}


def _of_dict(thing: Any, name: str) -> Iterator[Content]:
    for number, (key, value) in enumerate(list(dict.items(thing))):
        if type(value) not in ATOMS and (number < CROWD or _is_leaf(type(value))):
            yield Content(f"[{key_text(key)}]", value)
        if type(key) not in ATOMS and number < CROWD:
            yield Content("", key, "", "a key", f" of `{name}`")
    if type(thing) not in (dict, collections.OrderedDict, collections.defaultdict):
        yield from (Content(f".{key}", value) for key, value in attributes(thing).items() if type(value) not in ATOMS)


def _of_sequence(thing: Any, kind: type) -> Iterator[Content]:
    base: Any = list if issubclass(kind, list) else tuple if issubclass(kind, tuple) else collections.deque
    fields: Any = type.__getattribute__(kind, "__dict__").get("_fields") if base is tuple else None
    named = type(fields) is tuple and all(type(field) is str for field in fields)
    for number, value in enumerate(list(base.__iter__(thing))):
        if type(value) not in ATOMS and (number < CROWD or _is_leaf(type(value))):
            yield Content(f".{fields[number]}" if named and number < len(fields) else f"[{number}]", value)
    if kind not in (list, tuple, collections.deque):
        yield from (Content(f".{name}", value) for name, value in attributes(thing).items() if type(value) not in ATOMS)


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) or kind.__name__ == "ndarray"


def _of_cache(thing: Any, name: str) -> Iterator[Content]:
    wrapped = CACHE.__dict__["__dict__"].__get__(thing).get("__wrapped__") if "__dict__" in CACHE.__dict__ else None
    if wrapped is not None:
        yield Content("", wrapped)
    for inside in gc.get_referents(thing):
        if inside is not wrapped and type(inside) not in ATOMS and not issubclass(type(inside), type):
            yield Content("", inside, "", "the cache", f" of `{name}`")


def _of_class(kind: Any) -> Iterator[Content]:
    for key, value in type.__getattribute__(kind, "__dict__").items():
        value = value.__func__ if type(value) in (staticmethod, classmethod) else value
        value = value.fget if type(value) is property else value
        if type(value) not in ATOMS and not key.startswith("__"):
            yield Content(f".{key}", value)


def _inside(thing: Any, name: str) -> list[Content]:
    """What the garbage collector says: of partials, iterators, and other things made in C."""
    name = name.rpartition(" inside of `")[2].rstrip("`") if name.startswith("something") else name
    return [
        Content("", value, "", "something", f" inside of `{name}`")
        for value in gc.get_referents(thing)
        if type(value) not in ATOMS and not issubclass(type(value), type)
    ]
