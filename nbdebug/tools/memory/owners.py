"""From the user's names to all that they lead to: each storage gets every name that leads to it, and one owner.

A storage is the memory behind tensors and arrays: where it lies and how much it is, the same for all that show it. A
view, a tied weight and an expanded tensor have the storage of another; a sparse tensor has those of its parts. What has
no data of its own (fake and meta tensors, wrappers around others) has none.

What lies inside an object is read without running any of the user's code: no property, `__getattr__`, `__iter__` or
`__repr__` runs; attributes are read from where they lie, a subclass of a dict is read as the dict that it is, and what
Python gives no access to comes from the garbage collector.

The walk goes breadth first, so that a thing has its shortest name, and first through what comes first in facts.KINDS. A
storage may be reached by several names; its owner is the first of them in the order of KINDS, the nearest of those.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import math
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch

from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.variables import (
    ATOMS,
    HEAP_TYPE,
    attributes,
    closure_variables,
    frame_variables,
    is_user_module,
    key_text,
    user_variables,
)
from nbdebug.report import Where
from nbdebug.tools.memory.facts import KINDS, NOWHERE
from nbdebug.tools.memory.reachability import STOPS

# -- the memory behind tensors -----------------------------------------------------------------------------------------


Key = tuple[str, int]
"""A device and an address on it."""
_SPARSE = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class StorageView(NamedTuple):
    """One storage as one tensor shows it. bytes: of the storage; shown: of them, what this tensor shows; dtype, shape:
    of the tensor. It holds no memory itself."""

    key: Key
    bytes: int
    shown: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def device(self) -> str:
        return self.key[0]

    def on(self, device: str) -> bool:
        """Whether it is on this device. A device without a number means any of its kind; "" means any at all."""
        return device in ("", self.device, self.device.partition(":")[0])


def pieces(tensor: Any) -> tuple[StorageView, ...]:
    """The storages of a tensor: one, for a sparse one those of its parts, none where there are no data."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            layout = tensor.layout
            if layout is torch.strided and not tensor.is_nested:
                view = _piece(tensor)
                return () if view is None else (view,)
            return tuple(piece for part in _parts(tensor, layout) if (piece := _piece(part)) is not None)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):  # no storage at all: a wrapper
        return ()


def array_pieces(array: Any) -> tuple[StorageView, ...]:
    """The memory of a numpy array, at the array that owns it; none for one that shows memory of another library."""
    kind = sys.modules["numpy"].ndarray
    owner = array
    while not owner.flags.owndata and issubclass(type(owner.base), kind):
        owner = owner.base
    count = int(owner.nbytes)
    if not owner.flags.owndata or not count or owner.dtype.hasobject:
        return ()
    address = kind.__array_interface__.__get__(owner)["data"][0]
    return (
        StorageView(("cpu", address), count, min(count, int(array.nbytes)), f"numpy {array.dtype}", tuple(array.shape)),
    )


def live() -> list[Any]:
    """All tensors that Python knows of. The list holds them: it must not outlive the caller."""
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Tensor)}
    return [thing for thing in things if type(thing) in kinds]


def _parts(tensor: Any, layout: Any) -> Iterable[Any]:
    if tensor.is_nested and layout is torch.strided:
        return (tensor.values(),)
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in _SPARSE:
        return (*(getattr(tensor, name)() for name in _SPARSE[layout]), tensor.values())
    if layout is torch.jagged:  # a nested tensor: its values are an attribute, and a tensor themselves
        return ()
    return (tensor,)


def _piece(tensor: Any) -> StorageView | None:
    storage = tensor.untyped_storage()
    device = storage.device
    count = storage.nbytes()
    if not count or device.type == "meta":
        return None
    address = storage.data_ptr()
    if not address:
        return None
    shape = tuple(tensor.shape)
    shown = min(count, math.prod(n for n, step in zip(shape, tensor.stride()) if step) * tensor.element_size())
    return StorageView((_name(device), address), count, shown, _dtype(tensor.dtype), shape)


_names: dict[Any, str] = {}


def _name(device: Any) -> str:
    if device not in _names:
        _names[device] = str(device)
    return _names[device]


def _dtype(dtype: Any) -> str:
    if dtype not in _names:
        _names[dtype] = str(dtype).removeprefix("torch.")
    return _names[dtype]


# -- what lies inside an object ----------------------------------------------------------------------------------------


LEAVES = frozenset({*ATOMS, bytearray, torch.layout})
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
            if type(value) not in LEAVES and (number < CROWD or _is_leaf(type(value)))
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
    own = [Content(f".{key}", value) for key, value in values.items() if type(value) not in LEAVES]
    return own if values or type.__getattribute__(kind, "__flags__") & HEAP_TYPE else _inside(thing, name)


def of_function(function: Any, name: str) -> Iterator[Content]:
    """The variables of its closure, its defaults, and what hangs on it."""
    code = function.__code__
    behind = f" in {name}" if name.startswith(HOOK) else f" in the closure of `{name}`"
    for variable, value in closure_variables(function).items():
        if type(value) not in LEAVES:
            yield Content("", value, CLOSURE, variable, behind)
    positional = function.__defaults__ or ()
    defaults = dict(zip(code.co_varnames[code.co_argcount - len(positional) : code.co_argcount], positional))
    for variable, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
        if type(value) not in LEAVES:
            yield Content("", value, "", variable, f", a default of `{name}`")
    yield from (
        Content(f".{key}", value)
        for key, value in function.__dict__.items()
        if key != "__wrapped__" and type(value) not in LEAVES
    )
    if "__wrapped__" in function.__dict__:
        yield Content("", function.__dict__["__wrapped__"])


def variables(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a function's frame; {} of a frame that is no function's."""
    return {name: value for name, value in frame_variables(frame).items() if type(value) not in LEAVES}


def _of_dict(thing: Any, name: str) -> Iterator[Content]:
    for number, (key, value) in enumerate(list(dict.items(thing))):
        if type(value) not in LEAVES and (number < CROWD or _is_leaf(type(value))):
            yield Content(f"[{key_text(key)}]", value)
        if type(key) not in LEAVES and number < CROWD:
            yield Content("", key, "", "a key", f" of `{name}`")
    if type(thing) not in (dict, collections.OrderedDict, collections.defaultdict):
        yield from (Content(f".{key}", value) for key, value in attributes(thing).items() if type(value) not in LEAVES)


def _of_sequence(thing: Any, kind: type) -> Iterator[Content]:
    base: Any = list if issubclass(kind, list) else tuple if issubclass(kind, tuple) else collections.deque
    fields: Any = type.__getattribute__(kind, "__dict__").get("_fields") if base is tuple else None
    named = type(fields) is tuple and all(type(field) is str for field in fields)
    for number, value in enumerate(list(base.__iter__(thing))):
        if type(value) not in LEAVES and (number < CROWD or _is_leaf(type(value))):
            yield Content(f".{fields[number]}" if named and number < len(fields) else f"[{number}]", value)
    if kind not in (list, tuple, collections.deque):
        yield from (
            Content(f".{name}", value) for name, value in attributes(thing).items() if type(value) not in LEAVES
        )


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) or kind.__name__ == "ndarray"


def _of_cache(thing: Any, name: str) -> Iterator[Content]:
    wrapped = CACHE.__dict__["__dict__"].__get__(thing).get("__wrapped__") if "__dict__" in CACHE.__dict__ else None
    if wrapped is not None:
        yield Content("", wrapped)
    for inside in gc.get_referents(thing):
        if inside is not wrapped and type(inside) not in LEAVES and not issubclass(type(inside), type):
            yield Content("", inside, "", "the cache", f" of `{name}`")


def _of_class(kind: Any) -> Iterator[Content]:
    for key, value in type.__getattribute__(kind, "__dict__").items():
        value = value.__func__ if type(value) in (staticmethod, classmethod) else value
        value = value.fget if type(value) is property else value
        if type(value) not in LEAVES and not key.startswith("__"):
            yield Content(f".{key}", value)


def _inside(thing: Any, name: str) -> list[Content]:
    """What the garbage collector says: of partials, iterators, and other things made in C."""
    name = name.rpartition(" inside of `")[2].rstrip("`") if name.startswith("something") else name
    return [
        Content("", value, "", "something", f" inside of `{name}`")
        for value in gc.get_referents(thing)
        if type(value) not in LEAVES and not issubclass(type(value), type)
    ]


# -- names and owners --------------------------------------------------------------------------------------------------


RANK = {kind: rank for rank, kind in enumerate(KINDS)}


class Ownership(NamedTuple):
    """A name that leads to a storage: `head`, and `tail`, which stays behind whatever is written further: "x[0]" and
    " in step, line 3". root: the variable, the output or the function that it begins with."""

    kind: str
    head: str
    root: str
    where: Where = NOWHERE
    tail: str = ""

    @property
    def name(self) -> str:
        return self.head + self.tail

    def then(self, path: str) -> Ownership:
        """The owner of a part."""
        return Ownership(self.kind, self.head + path, self.root, self.where, self.tail)

    def of(self, kind: str) -> Ownership:
        """The owner as one of this kind. What only an output, a traceback or a graph leads to stays theirs."""
        if self.kind in ("cell output", "traceback", "graph"):
            return self
        return Ownership(kind, self.head, self.root, self.where, self.tail)


@dataclasses.dataclass
class Owned:
    """A storage: as the one of its tensors with a name shows it that shows most, its owner, and other names."""

    piece: StorageView
    owner: Ownership | None = None
    also: list[str] = dataclasses.field(default_factory=list)

    def add_owner(self, owner: Ownership) -> None:
        """One more name that leads here. That a graph holds a weight as well is not worth telling."""
        mine = self.owner
        if mine is None:
            self.owner = owner
            return
        if RANK[owner.kind] < RANK[mine.kind]:
            self.owner, owner, mine = owner, mine, owner
        known = owner.name == mine.name or owner.name in self.also
        if not known and len(self.also) < 3 and (owner.kind != "graph" or RANK[mine.kind] >= RANK["variable"]):
            self.also.append(owner.name)


SHELLS = ("nbdebug", "IPython", "ipykernel")
"""Packages whose frames stand between the notebook and the user's code."""


class Failed(NamedTuple):
    """One frame of a traceback. variables: its own, by name; where: the line at which it failed."""

    function: str
    variables: dict[str, Any]
    where: Where


def linked(error: BaseException) -> list[tuple[str, Any]]:
    """What an exception refers to beside its attributes, read past properties of its class."""
    own = vars(BaseException)
    links = [(key, own[key].__get__(error)) for key in ("args", "__traceback__", "__cause__", "__context__")]
    return [(key, value) for key, value in links if value]


def frames_of(trace: TracebackType | None) -> Iterator[Failed]:
    """The frames with variables, outermost first, without those of the shell."""
    while trace is not None:
        frame = trace.tb_frame
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in SHELLS:
            held = variables(frame)
            if held:
                code = frame.f_code
                site = Site(code.co_filename, trace.tb_lineno, code.co_name)
                yield Failed(code.co_name, held, at_site(Where(), site))
        trace = trace.tb_next


MOST = 300_000
"""Objects opened in one walk, about a second. A look that stops there says so."""
TENSOR, ARRAY, MODULE, OPTIMIZER, ERROR, TRACE, SAVED, STOP, OTHER = range(9)
_Saved: Any = torch._C._autograd.SavedTensor
_SORTS = (
    (TENSOR, torch.Tensor),
    (MODULE, torch.nn.Module),
    (OPTIMIZER, torch.optim.Optimizer),
    (ERROR, BaseException),
    (TRACE, types.TracebackType),
    (SAVED, _Saved),
    (STOP, types.ModuleType),
)
_QUIET = frozenset(vars(torch.nn.Module())) - {
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
}
"""What every module has of its own; of it only hooks lead further."""
_TENSORS = ("_parameters", "parameter"), ("_buffers", "buffer")


class OwnerIndex:
    """All names, and what they lead to. owned: by storage; keepers: (owner, node) of tensors that keep a graph; names:
    of all that was opened, and parameters: of each parameter, by id; whole: False where there was too much to open;
    unseen: saved tensors that this version of torch does not show."""

    def __init__(self, stop: Iterable[Any] = ()) -> None:
        self.owned: dict[Key, Owned] = {}
        self.keepers: list[tuple[Ownership, Any]] = []
        self.names: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        self.whole, self.unseen = True, 0
        self.made: list[Any] = []  # on the way: held, for an id must not be given away again
        self._stop = {id(thing) for thing in stop if thing is not None}
        self._sorts: dict[type, int] = {}
        self._pieces: dict[int, tuple[StorageView, ...]] = {}
        self._todo: list[collections.deque[tuple[Any, Ownership]]] = [collections.deque() for _ in KINDS]
        self._late: collections.deque[tuple[Any, Ownership]] = collections.deque()

    # -- where to begin -----------------------------------------------------------------------------------------------

    def models(self, named: Mapping[str, Any]) -> None:
        for name, model in named.items():
            self._visit(model, Ownership("variable", name, name))

    def optimizers(self, named: Mapping[str, Any]) -> None:
        for name, optimizer in named.items():
            self._visit(optimizer, Ownership("optimizer state", name, name))

    def variables(self, names: Mapping[str, Any]) -> None:
        """The user's variables, without what a shell keeps among them."""
        self._stop.add(id(names))
        for name, value in list(user_variables(names).items()):
            self.add(value, Ownership("variable", name, name))

    def files(self, names: Mapping[str, Any]) -> None:
        """The globals of the user's own files, as far as they are not among the variables that were given."""
        for name, module in list(sys.modules.items()):
            if type(module) is types.ModuleType and name != "__mp_main__" and is_user_module(name):
                main = name == "__main__"
                for key, value in list(user_variables(vars(module)).items()):
                    if names.get(key) is not value:
                        self.add(value, Ownership("variable", key if main else f"{name}.{key}", key if main else name))

    def calls(self, frame: types.FrameType | None, names: Mapping[str, Any]) -> None:
        """The variables of the user's functions that are running, from this frame outwards."""
        while frame is not None:
            if is_user_module(str(frame.f_globals.get("__name__", ""))):
                function = frame.f_code.co_name
                for name, value in variables(frame).items():
                    if names.get(name) is not value:
                        self.add(value, Ownership("variable", name, function, tail=f" in {function}"))
            frame = frame.f_back

    def add(self, value: Any, owner: Ownership) -> None:
        """One more thing to open, under this name."""
        if type(value) not in LEAVES and id(value) not in self._stop:
            self._todo[RANK[owner.kind]].append((value, owner))

    def walk(self) -> None:
        """Open all that was added and all that lies in it, MOST things at most; what is left then is dropped, so that
        it takes nothing from what is opened next."""
        most = len(self.names) + MOST
        while len(self.names) < most:
            queue = next((queue for queue in self._todo if queue), self._late)
            if not queue:
                return
            self._visit(*queue.popleft())
        self.whole = False
        for queue in (*self._todo, self._late):
            queue.clear()

    def pieces(self, tensor: Any) -> tuple[StorageView, ...]:
        """The storages of a tensor, which must outlive the index: they are remembered for it."""
        views = self._pieces.get(id(tensor))
        if views is None:
            views = self._pieces[id(tensor)] = pieces(tensor)
        return views

    def record(self, piece: StorageView, owner: Ownership | None = None) -> Owned:
        """What is known of this storage, with one more name for it."""
        owned = self.owned.get(piece.key)
        if owned is None:
            owned = self.owned[piece.key] = Owned(piece)
        if owner is not None:
            if owner.kind != "graph" and piece.shown > owned.piece.shown:
                owned.piece = piece
            owned.add_owner(owner)
        return owned

    # -- one thing ----------------------------------------------------------------------------------------------------

    def _visit(self, thing: Any, owner: Ownership) -> None:
        sort = self._sorts.get(type(thing))
        if sort is None:
            sort = self._sorts[type(thing)] = _sort(type(thing))
        if sort == TENSOR:
            self._tensor(thing, owner)
        elif sort == ARRAY:
            for piece in array_pieces(thing):
                self.record(piece, owner)
        elif sort != STOP and id(thing) not in self.names and id(thing) not in self._stop:
            self.names[id(thing)] = owner.name
            if sort == MODULE:
                self._module(thing, owner)
            elif sort == OPTIMIZER:
                self._optimizer(thing, owner)
            elif sort == SAVED:
                self._saved(thing, owner)
            elif sort in (ERROR, TRACE):
                self._failure(thing, owner)
            else:
                self._open(thing, owner)

    def _tensor(self, tensor: Any, owner: Ownership) -> None:
        for piece in self.pieces(tensor):
            self.record(piece, owner)
        if id(tensor) in self.names:
            return
        self.names[id(tensor)] = owner.name
        grad, node, hooks = autograd(tensor)
        if grad is not None:
            self.made.append(grad)
            self._tensor(grad, owner.then(".grad").of("gradient"))
        if node is not None:
            self.keepers.append((owner, node))
        if hooks:
            self.made.append(hooks)
            self._hooks(hooks, owner)
        for key, value in attributes(tensor).items():
            self.add(value, owner.then(f".{key}"))

    def _module(self, module: Any, owner: Ownership) -> None:
        values = attributes(module)
        for place, kind in _TENSORS:
            for key, tensor in dict(values.get(place) or {}).items():
                if tensor is not None:
                    if kind == "parameter":
                        self.parameters.setdefault(id(tensor), owner.then(f".{key}").name)
                    self._visit(tensor, owner.then(f".{key}").of(kind))
        for key, part in dict(values.get("_modules") or {}).items():
            self._visit(part, owner.then(f".{key}"))
        for key, value in values.items():
            if key.endswith("_hooks") and issubclass(type(value), dict):
                self._hooks(value, owner)
            elif key not in _QUIET and type(value) not in LEAVES:
                self.add(value, owner.then(f".{key}"))
        self.add(type(module), owner._replace(head=type(module).__name__, tail=""))

    def _hooks(self, hooks: Any, owner: Ownership) -> None:
        """What hooks keep. Each is named by its function and by what it is a hook of."""
        for hook in list(dict.values(hooks)):
            called = hook.__name__ if type(hook) is types.FunctionType else type(hook).__name__
            self.add(hook, owner._replace(kind="closure", head=f"{HOOK}`{called}`", tail=f" of {owner.name}"))

    def _optimizer(self, optimizer: Any, owner: Ownership) -> None:
        values = attributes(optimizer)
        owner = owner.of("optimizer state")
        state = values.pop("state", None)
        for parameter, entry in list(dict.items(state)) if issubclass(type(state), dict) else ():
            key = self.parameters.get(id(parameter), "a parameter")
            self.add(entry, owner.then(f".state[{key}]"))
        groups = values.get("param_groups")
        for number, group in enumerate(groups) if type(groups) is list else ():
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in self.parameters:  # of a model that has no name: the optimizer keeps it
                    path = f".param_groups[{number}]['params'][{place}]"
                    self._visit(parameter, owner.then(path).of("parameter"))
            for key, value in group.items():
                if key != "params":
                    self.add(value, owner.then(f".param_groups[{number}][{key!r}]"))
        for key, value in values.items():
            if key.endswith("_hooks") and issubclass(type(value), dict):
                self._hooks(value, owner)  # a watcher's, or the user's: no state of the optimizer
            elif key != "param_groups":
                self.add(value, owner.then(f".{key}"))

    def _saved(self, saved: Any, owner: Ownership) -> None:
        """What was saved for a backward, as it is stored: a hook that unpacks does not run for it."""
        if not hasattr(saved, "data"):  # before torch 2.7
            self.unseen += 1
            return
        inside = [saved.data, getattr(saved, "unpack_hook", None)]
        self.made += inside
        for one in inside:
            self.add(one, owner)

    def _failure(self, thing: Any, owner: Ownership) -> None:
        """An exception or a traceback: what it carries, and the variables of the frames that failed."""
        if issubclass(type(thing), BaseException):
            for key, value in [*attributes(thing).items(), *linked(thing)]:
                if type(value) is types.TracebackType:  # at once: the shell keeps it under another name as well
                    self._visit(value, owner.then(f".{key}"))
                else:
                    self.add(value, owner.then(f".{key}"))
            return
        for frame in frames_of(thing):
            for name, value in frame.variables.items():
                tail = f" in {frame.function}, {frame.where.place}"
                self.add(value, Ownership("traceback", name, owner.root, frame.where, tail))

    def _open(self, thing: Any, owner: Ownership) -> None:
        kind = type(thing)
        if issubclass(kind, type) and not is_user_module(str(type.__getattribute__(thing, "__module__"))):
            return
        inside = list(parts(thing, owner.name))
        if not inside:
            return
        graph = owner.kind == "graph"
        queue = self._late if len(inside) >= CROWD else None  # a data set comes last, and may not be opened whole
        self.whole = self.whole and queue is None
        for path, value, other, head, tail in inside:
            sort = other if RANK.get(other, 0) > RANK[owner.kind] else owner.kind
            called = (
                owner
                if graph
                else Ownership(sort, head or owner.head + path, owner.root, owner.where, tail if head else owner.tail)
            )
            (self._todo[RANK[called.kind]] if queue is None else queue).append((value, called))
        if not issubclass(kind, type):
            self.add(kind, owner._replace(head=kind.__name__, tail=""))


def autograd(tensor: Any) -> tuple[Any, Any, Any]:
    """(gradient, graph node, hooks) of a tensor, where it has them."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            leaf = tensor.is_leaf
            return (
                tensor.grad if leaf or tensor.retains_grad else None,
                None if leaf else tensor.grad_fn,
                tensor._backward_hooks,
            )
        except RuntimeError:  # a view whose graph was spoiled by a change in place
            return None, None, None


def _sort(kind: type) -> int:
    for sort, kinds in _SORTS:
        if issubclass(kind, kinds):
            return sort
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return ARRAY
    if kind in LEAVES:
        return STOP
    package = str(type.__getattribute__(kind, "__module__")).partition(".")[0]
    return STOP if package in STOPS else OTHER
