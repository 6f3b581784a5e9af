"""The containers in reach of the user's names, with their lengths; and the tensors there that carry a graph.

A look walks from the variables, the step and what the step uses: through containers, attributes, closures, the globals
that a function names, hooks, caches and classes of the user's own. Nothing of the user's runs: attributes are read past
properties, and a subclass of a list or dict is read as the list or dict that it is. A tensor on the way is a slot:
the same variable may hold a longer graph at the next look.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbdebug.observe.backward import graph_nodes
from nbdebug.observe.duplicate_hooks import OF_TENSORS
from nbdebug.observe.variables import SHELL_NAMES, attributes, closure_variables, key_text

MOST_NODES = 30_000
"""For one tensor; a longer graph than that has grown for long, or is that of a very large model."""
MOST_IN_ALL = 300_000


def grows_from(slots: list[Any]) -> None:
    """Set the `size` of each slot to the number of nodes in the graph of its tensor."""
    left = MOST_IN_ALL
    for slot in slots:
        slot.size = nodes_of(slot.thing, min(MOST_NODES, left))
        left = max(0, left - slot.size)


def nodes_of(tensor: Any, most: int = MOST_NODES) -> int:
    """How many nodes a backward from here would run through; at most `most` are counted."""
    return sum(1 for _ in itertools.islice(graph_nodes([tensor.grad_fn]), most))


MOST = 200_000
"""Objects visited; more than these are in a data set, not in a record of a training."""
LONG, ENDS = 2048, 64
"""Of a container longer than this only so many members at both ends are opened: what grows, grows there."""
_ATOMS = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
    types.CodeType,
    range,
    slice,
    type(Ellipsis),
)
_LIBRARIES = frozenset(
    {
        "torch",
        "numpy",
        "pandas",
        "IPython",
        "ipykernel",
        "matplotlib",
        "traitlets",
        "nbdebug",
        "tqdm",
        *sys.stdlib_module_names,
    }
) - {"__main__"}
_OPENED = frozenset({"argparse", "concurrent", "contextlib", "logging", "queue", "threading"})
"""Of the standard library, where people keep what is theirs: a namespace, a queue, a handler, a thread's arguments."""
_QUIET = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
CACHE = functools._lru_cache_wrapper
OUTPUTS = ("Out", "_oh")


class Holder:
    """Something that may grow: a container, or a slot with a tensor. kind: "list", "dict", "deque", "set", "cache",
    "hooks", "object" (its attributes), "cycle" (what `itertools.cycle` has kept), "parts" (of an optimizer or a
    module), "slot" (a tensor with a graph) or "tensor" (or an array, or a table); size: its length, for a slot how many
    nodes its graph has, for a tensor its bytes; within: the holder it lies in, if that is a plain container."""

    __slots__ = ("bound", "kind", "label", "name", "owner", "size", "thing", "within")

    def __init__(
        self,
        thing: Any,
        name: str,
        kind: str,
        size: int,
        within: Holder | None,
        label: str = "",
        owner: Any = None,
        bound: int | None = None,
    ):
        self.thing, self.name, self.kind, self.size, self.within = thing, name, kind, size, within
        self.label, self.owner, self.bound = label, owner, bound


Key = tuple[int, str]
"""Containers are known again by their identity, slots by their name: what lies in one is another with every step."""
SLOT = -1


class HolderScan:
    """One scan. holders: by the identity of the object; files: of the user's functions on the way; whole: False where
    there was too much to see it all."""

    def __init__(self, names: Mapping[str, Any], step: Any, models: Mapping[str, Any]):
        self.holders: dict[Key, Holder] = {}
        self.files: dict[str, None] = {}
        self.whole = True
        self._seen: set[int] = {id(names)}
        self._todo: collections.deque[tuple[Any, str, str, Holder | None, Any]] = collections.deque()
        self._alive: list[Any] = []  # made on the way: an id must not be given away again
        for name, value in list(names.items()):
            if isinstance(name, str) and (name in OUTPUTS or not SHELL_NAMES.fullmatch(name)):
                self._todo.append((value, name, name, None, names))
        self._todo.append((step, "step", "step", None, None))
        self._todo.extend((model, name, name, None, None) for name, model in models.items())
        while self._todo:
            if len(self._seen) > MOST:
                self.whole = False
                self._todo.clear()
                break
            self._visit(*self._todo.popleft())

    def sizes(self) -> dict[Key, int]:
        """What is kept of a scan that is over: lengths, nothing that holds memory."""
        return {key: holder.size for key, holder in self.holders.items()}

    def _visit(self, thing: Any, name: str, label: str, within: Holder | None, owner: Any) -> None:
        kind = type(thing)
        if issubclass(kind, _ATOMS):
            return
        if issubclass(kind, torch.Tensor):
            self._tensor(thing, name, label, within, owner)
            return
        if (size := table_bytes(thing)) is not None:
            self.holders[SLOT, name] = Holder(thing, name, "tensor", size, None, label, owner)
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        holder = self._measured(thing, name, label, within, owner)
        if holder is not None:
            self.holders[id(thing), ""] = holder
        inner = holder if holder is not None and holder.kind in PLAIN else None
        for part, value in self._inside(thing, kind):
            joined = name + part if part[:1] in ".[" else part
            if issubclass(kind, tuple):  # nothing is put into a tuple: what may change is where the tuple lies
                self._todo.append((value, joined, label, within, owner))
            else:
                self._todo.append((value, joined, part, inner, thing))

    def _tensor(self, tensor: Any, name: str, label: str, within: Holder | None, owner: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            leaf = tensor.is_leaf
            grad = tensor.grad if leaf and tensor.requires_grad else None
            for key in OF_TENSORS if tensor.requires_grad else ():
                self._todo.append((getattr(tensor, key, None), f"{name}.{key}", key, None, tensor))
        if not leaf and tensor.requires_grad:
            self.holders[SLOT, name] = Holder(tensor, name, "slot", 0, within, label, owner)
        elif not tensor.requires_grad and type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            self.holders[SLOT, name] = Holder(tensor, name, "tensor", tensor.nbytes, None, label, owner)
        if grad is not None and grad.requires_grad:
            self._alive.append(grad)
            self.holders[SLOT, f"{name}.grad"] = Holder(grad, f"{name}.grad", "slot", 0, None, ".grad", tensor)

    def _measured(self, thing: Any, name: str, label: str, within: Holder | None, owner: Any) -> Holder | None:
        kind, size, bound = measure(thing)
        if not kind:
            return None
        if kind == "dict" and label.endswith("_hooks"):
            kind = "hooks"
        return Holder(thing, name, kind, size, within, label, owner, bound)

    # -- what lies inside ---------------------------------------------------------------------------------------------

    def _inside(self, thing: Any, kind: type) -> Iterable[tuple[str, Any]]:
        if issubclass(kind, dict):
            return _pairs(thing)
        if issubclass(kind, (list, tuple, collections.deque)):
            return _members(thing)
        if issubclass(kind, (set, frozenset)):
            return [
                ("[an item]", value)
                for value in itertools.islice(
                    set.__iter__(thing) if issubclass(kind, set) else frozenset.__iter__(thing), LONG
                )
            ]
        if issubclass(kind, types.FunctionType):
            if _users(thing.__module__ or "__main__", thing.__code__.co_filename):
                self.files[thing.__code__.co_filename] = None
            return _of_function(thing)
        return self._of_callable(thing, kind)

    def _of_callable(self, thing: Any, kind: type) -> Iterable[tuple[str, Any]]:
        """Of what wraps a function; else of a generator, a module, a class or an object."""
        if issubclass(kind, types.MethodType):
            return (
                [("self", thing.__self__), (thing.__func__.__name__, thing.__func__)]
                if isinstance(thing.__func__, types.FunctionType)
                else [("self", thing.__self__)]
            )
        if kind is functools.partial:
            given = [(f"[argument {i}]", a) for i, a in enumerate(thing.args)]
            return [("[function]", thing.func), *given, *((f".{k}", v) for k, v in thing.keywords.items())]
        if kind is CACHE:
            return [(str(getattr(thing.__wrapped__, "__name__", "a function")), thing.__wrapped__)]
        if issubclass(kind, types.GeneratorType):
            frame = thing.gi_frame
            inside = [("[cycle]", part) for part in gc.get_referents(thing) if type(part) is itertools.cycle]
            return [] if frame is None else [*frame.f_locals.items(), *((f"{thing.__name__}{k}", v) for k, v in inside)]
        if issubclass(kind, types.ModuleType):
            return (
                [(key, value) for key, value in vars(thing).items() if not key.startswith("__")]
                if _users(thing.__name__, getattr(thing, "__file__", None))
                else ()
            )
        if issubclass(kind, type):
            return _of_class(thing)
        return self._of_object(thing, kind)

    def _of_object(self, thing: Any, kind: type) -> Iterable[tuple[str, Any]]:
        if issubclass(kind, torch.nn.Module):
            own = attributes(thing)
            return [
                *(
                    (f".{k}", v)
                    for part in ("_modules", "_parameters", "_buffers")
                    for k, v in (own.get(part) or {}).items()
                ),
                *((f".{k}", v) for k, v in own.items() if k not in _QUIET),
                *_class_of(kind),
            ]
        if issubclass(kind, DataLoader):
            own = attributes(thing)
            return [(f".{k}", own[k]) for k in ("dataset", "collate_fn", "sampler", "batch_sampler") if k in own]
        package = str(type.__getattribute__(kind, "__module__")).partition(".")[0]
        if package in _LIBRARIES - _OPENED and kind is not types.SimpleNamespace:
            return ()
        return [*((f".{key}", value) for key, value in attributes(thing).items()), *_class_of(kind)]


PLAIN = ("list", "dict", "deque", "set")


def measure(thing: Any) -> tuple[str, int, int | None]:
    """(kind, length, the most it will ever hold) of a container; ("", 0, None) of anything else."""
    kind = type(thing)
    if issubclass(kind, list):
        return "list", list.__len__(thing), None
    if issubclass(kind, dict):
        return "dict", dict.__len__(thing), None
    if issubclass(kind, collections.deque):
        return "deque", collections.deque.__len__(thing), collections.deque.maxlen.__get__(thing)
    if issubclass(kind, set):
        return "set", set.__len__(thing), None
    if kind is itertools.cycle:
        kept = kept_by_cycle(thing)
        return ("", 0, None) if kept is None else ("cycle", len(kept), None)
    if kind is CACHE:
        info = CACHE.cache_info(thing)
        return "cache", info.currsize, info.maxsize
    if issubclass(kind, (torch.optim.Optimizer, torch.nn.Module)):
        return "parts", len(parts_of(thing)), None
    if kind is types.SimpleNamespace or (
        hasattr(kind, "__dictoffset__")
        and kind.__dictoffset__
        and not issubclass(kind, (type, types.FunctionType, types.ModuleType, torch.nn.Module, BaseException))
    ):
        return "object", len(attributes(thing)), None
    return "", 0, None


MEMBERS = ("_modules", "_parameters", "_buffers")


def parts_of(thing: Any) -> list[Any]:
    """The parameters of an optimizer; the modules, parameters or buffers of a module, whichever are more."""
    own = attributes(thing)
    if issubclass(type(thing), torch.nn.Module):
        return max((list((own.get(table) or {}).values()) for table in MEMBERS), key=len)
    return [p for group in own.get("param_groups") or () for p in group["params"]]


def table_bytes(thing: Any) -> int | None:
    """The bytes of an array of numpy's, of a table or a column of pandas'; None of anything else."""
    kind = type(thing)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return int(thing.nbytes)
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        used = thing.memory_usage(index=False)
        return int(used if kind.__name__ == "Series" else used.to_numpy().sum())
    return None


def kept_by_cycle(thing: Any) -> list[Any] | None:
    """What an `itertools.cycle` has kept so far; None where it goes through a list, which holds the same things."""
    parts = gc.get_referents(thing)
    if any(isinstance(part, (type(iter([])), type(iter(())))) for part in parts):
        return None
    return next((part for part in parts if type(part) is list), None)


def _pairs(thing: Any) -> Iterator[tuple[str, Any]]:
    count = dict.__len__(thing)
    pairs: Any = (
        list(dict.items(thing))
        if count <= LONG
        else [*itertools.islice(dict.items(thing), ENDS), *itertools.islice(reversed(dict.items(thing)), ENDS)]
    )
    for key, value in pairs:
        if not issubclass(type(value), _ATOMS):
            yield f"[{key_text(key)}]", value


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    base: Any = next(k for k in (list, tuple, collections.deque) if issubclass(type(thing), k))
    count = base.__len__(thing)
    numbers: Iterable[int] = range(count) if count <= LONG else [*range(ENDS), *range(count - ENDS, count)]
    for number in numbers:
        value = base.__getitem__(thing, number)
        if not issubclass(type(value), _ATOMS):
            yield f"[{number}]", value


def _of_function(function: Any) -> Iterator[tuple[str, Any]]:
    """The variables of its closure, the globals that it names, its defaults, and what hangs on it."""
    yield from closure_variables(function).items()
    if _users(function.__module__ or "__main__", function.__code__.co_filename):
        known = function.__globals__
        for name in _named_in(function.__code__):
            if name in known:
                yield name, known[name]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(reversed(names), reversed(function.__defaults__ or ()))
    yield from (
        (function.__name__ + f".{key}", value) for key, value in function.__dict__.items() if key != "__wrapped__"
    )
    if isinstance(function.__dict__.get("__wrapped__"), (types.FunctionType, CACHE)):
        yield function.__name__, function.__dict__["__wrapped__"]


def _named_in(code: types.CodeType) -> set[str]:
    return {
        *code.co_names,
        *(name for part in code.co_consts if isinstance(part, types.CodeType) for name in _named_in(part)),
    }


def _class_of(kind: type) -> list[tuple[str, Any]]:
    return [(kind.__name__, kind)] if _users(str(type.__getattribute__(kind, "__module__")), None) else []


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    if _users(str(type.__getattribute__(kind, "__module__")), None):
        for key, value in type.__getattribute__(kind, "__dict__").items():
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(value, (types.FunctionType, CACHE)):
                yield key, value
            elif not key.startswith("__"):
                yield f".{key}", value
        for parent in kind.__mro__[1:]:
            yield parent.__name__, parent


def _users(module: str, file: str | None) -> bool:
    """Code of the user's own, by its module's name and file."""
    if module.partition(".")[0] in _LIBRARIES:
        return False
    return file is None or ("site-packages" not in file and (file[:1] != "<" or file.startswith(("<ipython", "<cell"))))


def count_graphs(holders: Iterable[Holder]) -> None:
    """Fill in the sizes of slots: how many nodes their graphs have."""
    grows_from([holder for holder in holders if holder.kind == "slot"])


MOST_VALUES = 20_000
_SHARED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    torch.Tensor,
    torch.nn.Module,
    torch.dtype,
    torch.device,
    BaseException,
)


def plain_bytes(items: Iterable[Any], known: Iterable[Any] = ()) -> int:
    """The sizes of all plain objects in `items` that are not in `known`; of more than MOST, the first ones."""
    visited: set[int] = set()
    _sum(list(known), visited)
    return _sum(list(items), visited)


def _sum(todo: list[Any], visited: set[int]) -> int:
    total = count = 0
    while todo and count < MOST_VALUES:
        thing = todo.pop()
        if id(thing) in visited or isinstance(thing, _SHARED) or thing is None or thing is True or thing is False:
            continue
        visited.add(id(thing))
        count += 1
        total += object.__sizeof__(thing) if type(thing).__module__ != "builtins" else sys.getsizeof(thing)
        todo += gc.get_referents(thing)
    return total
