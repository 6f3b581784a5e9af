"""The containers in reach of the user's names, with their lengths, the tensors there that carry a graph, and what of
all that grows from scan to scan.

A look walks from the variables, the step and what the step uses: through containers, attributes, closures, the globals
that a function names, hooks, caches and classes of the user's own. Nothing of the user's runs: attributes are read past
properties, and a subclass of a list or dict is read as the list or dict that it is. A tensor on the way is a slot:
the same variable may hold a longer graph at the next look.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbdebug.observe.backward import graph_nodes
from nbdebug.observe.duplicate_hooks import OF_TENSORS
from nbdebug.observe.variables import (
    ATOMS,
    LIBRARIES,
    SHELL_NAMES,
    attributes,
    closure_variables,
    is_packages_file,
    key_text,
)
from nbdebug.text import module_name
from nbdebug.tools.memory.reachability import ReachabilityWalk

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
_ATOMS = (*ATOMS, bytearray)
_LIBRARIES = (LIBRARIES | {"tqdm"}) - {"__main__"}
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
    if module_name(kind).partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
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
    return file is None or (not is_packages_file(file) and (file[:1] != "<" or file.startswith(("<ipython", "<cell"))))


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


# -- what grows from scan to scan --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Growth:
    """What grows. holders: of it, more than one where they lie in one container; items: a step adds so many;
    nodes: so many nodes of a graph; bytes: in tensors and arrays, of a step's items alone; own: of that, what would
    stay if the items had no graph; shown: what the items are by their shapes, which is less where they are views of
    larger tensors; plain: in other Python objects; arrays: they are numpy's."""

    holders: list[Holder]
    name: str
    kind: str
    items: int = 0
    nodes: int = 0
    bytes: int = 0
    own: int = 0
    shown: int = 0
    plain: int = 0
    grad: bool = False
    errors: bool = False
    arrays: bool = False
    keys: frozenset[Any] = frozenset()

    @property
    def bounded(self) -> bool:
        return all(holder.bound is not None for holder in self.holders)

    @property
    def chain(self) -> bool:
        return self.kind == "slot"


def growths_of(last: HolderScan, sizes: list[dict[Key, int]], known: ReachabilityWalk) -> list[Growth]:
    """What was longer after each of the last steps than before it. sizes: of the scan before the first step, and of
    those after each. known: memory of models and optimizers, which is nobody's leak."""
    after = sizes[-min(3, len(sizes)) :]  # the first step may well fill things that stay as they are from then on
    growing = [holder for key, holder in last.holders.items() if _rises([s.get(key) for s in after])]
    step = {key: after[-1][key] - after[-2][key] for key in after[-1] if key in after[-2]}
    growths = []
    for holders in _by_container(growing):
        whole = _measured(holders, [step[_key_of(s)] for s in holders], known)
        if whole is not None:
            growths.append(whole)
    growths += [] if any(one.kind != "tensor" for one in growths) else _linked(last, after)
    return sorted(growths, key=lambda g: (-g.bytes, -g.nodes, -g.plain, len(g.name)))


def _linked(last: HolderScan, after: list[dict[Key, int]]) -> list[Growth]:
    """Objects that each refer to the one before (`frame.previous.previous`): tensors that lie deeper and deeper."""
    depths = [Counter(_REPEATED.sub(r"\1", key[1]) for key in sizes if key[0] == SLOT) for sizes in after]
    for name in depths[-1]:
        if not _rises([depth.get(name) for depth in depths]):
            continue
        longest = max((k[1] for k in after[-1] if k[0] == SLOT and _REPEATED.sub(r"\1", k[1]) == name), key=len)
        again = _REPEATED.search(longest)
        base = longest[: again.start()] if again is not None else ""
        first = next((h for h in last.holders.values() if h.name == base and h.kind == "object"), None)
        if again is None or first is None:
            continue
        before, now = (sum(v for k, v in s.items() if k[0] == SLOT and k[1].startswith(base)) for s in after[-2:])
        slot = Holder(first.thing, base, "tensor", 0, None, first.label, first.owner)
        return [Growth([slot], base + again[1], "linked", 1, bytes=now - before, own=now - before, shown=now - before)]
    return []


_REPEATED = re.compile(r"(\.\w+)\1+")


def _rises(values: list[int | None]) -> bool:
    return len(values) > 1 and all(b is not None and a is not None and b > a for a, b in itertools.pairwise(values))


def _key_of(holder: Holder) -> Key:
    return (SLOT, holder.name) if holder.kind in ("slot", "tensor") else (id(holder.thing), "")


def _by_container(growing: list[Holder]) -> list[list[Holder]]:
    """Those that lie in one plain container are one: `metrics["loss"]` and `metrics["accuracy"]` are `metrics`."""
    groups: dict[Any, list[Holder]] = {}
    for holder in growing:
        key: Any = (id(holder.within.thing), holder.kind) if holder.within is not None else id(holder)
        if holder.kind == "tensor":  # the keys and values of all layers are one cache
            key = re.split(r"[.\[]", holder.name)[0]
        groups.setdefault(key, []).append(holder)
    return list(groups.values())


def _measured(holders: list[Holder], added: list[int], known: ReachabilityWalk) -> Growth | None:
    first = holders[0]
    name = first.name if len(holders) == 1 or first.within is None else first.within.name
    whole = Growth(holders, name, first.kind)
    if first.kind == "tensor":
        if len(holders) > 1:
            parts = zip(*(re.findall(r"[.\[]?[^.\[]+", holder.name) for holder in holders))
            whole.name = "".join(same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, parts))
        whole.bytes = whole.own = whole.shown = sum(added)
        whole.arrays = not isinstance(first.thing, torch.Tensor)
        return whole
    if whole.chain:
        whole.nodes, whole.grad = sum(added), True
        return whole
    if first.kind == "parts":  # a model has them, too
        whole.items, whole.keys = sum(added), frozenset()
        blocks = ReachabilityWalk(graphs=False)(*newest(first, added[0]))
        whole.bytes = whole.own = whole.shown = sum(b.bytes for b in blocks)
        return whole
    telling = [n for n, holder in enumerate(holders) if any(True for _ in tensors_of(newest(holder, added[n])))]
    if 0 < len(telling) < len(holders):  # numbers beside them take no memory
        whole.holders = holders = [holders[n] for n in telling]
        added = [added[n] for n in telling]
        whole.name = holders[0].name if len(holders) == 1 else name
    new = [item for holder, count in zip(holders, added) for item in newest(holder, count)]
    old = [item for holder, count in zip(holders, added) for item in newest(holder, 2 * count)[count:]]
    containers = [holder.thing for holder in holders]  # a frame that an item holds may lead back to them
    before = ReachabilityWalk(after=known, stop=containers)
    before(*old)
    blocks = ReachabilityWalk(after=before, stop=containers)(*new)
    bare = ReachabilityWalk(after=before, stop=containers, graphs=False, tracebacks=False)(*new)
    whole.items, whole.bytes, whole.own = sum(added), sum(b.bytes for b in blocks), sum(b.bytes for b in bare)
    whole.keys = frozenset(b.key for b in blocks)
    tensors = list(tensors_of(new))
    whole.grad = any(t.requires_grad and t.grad_fn is not None for t in tensors)
    whole.errors = any(isinstance(item, BaseException) or issubclass(type(item), BaseException) for item in flat(new))
    whole.shown = sum(t.numel() * t.element_size() for t in tensors if t.layout is torch.strided)
    arrays = [
        item.nbytes for item in flat(new) if type(item).__module__ == "numpy" and type(item).__name__ == "ndarray"
    ]
    whole.shown, whole.arrays = whole.shown + sum(arrays), bool(arrays) and not tensors
    whole.plain = plain_bytes(new, old)
    if first.name.split("[")[0] in OUTPUTS:
        whole.kind = "output"
    return whole


def newest(holder: Holder, count: int) -> list[Any]:
    """The last `count` things that were put in, the newest first; of a set, where none is the newest, some."""
    thing: Any = holder.thing
    if holder.kind == "list":
        size = list.__len__(thing)
        return [list.__getitem__(thing, i) for i in range(size - 1, max(-1, size - 1 - count), -1)]
    if holder.kind == "deque":
        return list(itertools.islice(collections.deque.__reversed__(thing), count))
    if holder.kind in ("dict", "hooks"):
        return list(itertools.islice(reversed(dict.values(thing)), count))
    if holder.kind == "cycle":
        return (kept_by_cycle(thing) or [])[::-1][:count]
    if holder.kind == "set":
        return list(itertools.islice(set.__iter__(thing), count))
    if holder.kind == "cache":
        return _cached(thing, count)
    if holder.kind == "parts":
        state = attributes(thing).get("state") or {}
        return [part for p in parts_of(thing)[-count:] for part in (p, state.get(p))]
    return list(attributes(thing).values())[-count:] if holder.kind == "object" else [thing]


def _cached(cache: Any, count: int) -> list[Any]:
    """The newest results of an lru_cache: the dict inside is found through the garbage collector."""
    contents = [r for r in gc.get_referents(cache) if type(r) is dict and len(r) == CACHE.cache_info(cache).currsize]
    return list(itertools.islice(reversed(contents[0].values()), count)) if contents and count else []


def flat(items: Iterable[Any], depth: int = 3) -> Iterable[Any]:
    """Things, and what lies in them: containers, attributes and what a function is bound to, a few steps deep."""
    for item in itertools.islice(items, 200):
        yield item
        kind = type(item)
        base: Any = next((k for k in (list, tuple, set) if issubclass(kind, k)), None)  # namedtuples too
        if depth and base is not None:
            yield from flat(base.__iter__(item), depth - 1)
        elif depth and issubclass(kind, dict):
            yield from flat(dict.values(item), depth - 1)
        elif depth and kind is types.FunctionType:
            yield from flat([*closure_variables(item).values(), *(item.__defaults__ or ())], depth - 1)
        elif depth and kind is functools.partial:
            yield from flat([*item.args, *item.keywords.values()], depth - 1)
        elif depth and hasattr(kind, "__dict__") and not issubclass(kind, (torch.Tensor, type, BaseException)):
            yield from flat(attributes(item).values(), depth - 1)


def tensors_of(items: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (item for item in flat(items) if isinstance(item, torch.Tensor))


def watch_of(holder: Holder) -> Callable[[], Any]:
    """A function that gives the state of a holder: it changes when something is put in."""
    thing, owner, label = holder.thing, holder.owner, holder.label
    if holder.kind in ("slot", "tensor"):
        return lambda: _state(_slot(owner, label))
    if holder.kind == "cache":
        return lambda: CACHE.cache_info(thing).currsize
    if holder.kind in ("object", "parts"):
        return lambda: measure(thing)[1]
    base = next((k for k in (list, dict, collections.deque, set) if isinstance(thing, k)), None)
    return lambda: base.__len__(thing) if base is not None else 0


def _state(tensor: Any) -> tuple[int, int]:
    counts = isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    return id(tensor), tensor._version if counts else table_bytes(tensor) or 0


def _slot(owner: Any, label: str) -> Any:
    """What lies in a slot now."""
    if isinstance(owner, torch.Tensor):
        return owner.grad
    if label.startswith("."):
        own = attributes(owner)
        parts = [own, *(own.get(p) or {} for p in ("_buffers", "_parameters", "_modules"))]
        return next((part[label[1:]] for part in parts if label[1:] in part), None)
    if isinstance(owner, dict):
        return next((v for k, v in dict.items(owner) if label in (f"[{k!r}]", k)), None)
    if isinstance(owner, (list, tuple)) and label[1:-1].isdigit():
        return owner[int(label[1:-1])] if int(label[1:-1]) < len(owner) else None
    code = getattr(owner, "__code__", None)
    if code is not None and label in code.co_freevars:
        return owner.__closure__[code.co_freevars.index(label)].cell_contents
    return owner.__globals__.get(label) if code is not None else None


def still_growing(growths: list[Growth], step: Callable[[], Any], more: int) -> list[Growth]:
    """Those that are longer after each of some more steps. A record by batch of an epoch, or a cache of a few sizes,
    comes to its end; it is told from what never does by waiting a little longer."""
    for _ in range(more):
        before = [[_length(holder) for holder in one.holders] for one in growths]
        step()
        growths = [
            one
            for one, sizes in zip(growths, before)
            if any(_length(holder) > size for holder, size in zip(one.holders, sizes))
        ]
    return growths


def _length(holder: Holder) -> int:
    """Of a holder, now."""
    if holder.kind == "tensor":
        now = _slot(holder.owner, holder.label)
        return now.nbytes if isinstance(now, torch.Tensor) else table_bytes(now) or 0
    return measure(holder.thing)[1]


def distinct(growths: list[Growth], share: float = 0.05) -> list[Growth]:
    """Without those that hold nothing of their own: memory that another holds as well is reported once."""
    result: list[Growth] = []
    counted: set[Any] = set()
    for one in growths:
        if one.keys and len(one.keys & counted) >= (1 - share) * len(one.keys):
            continue
        counted |= one.keys
        result.append(one)
    return result
