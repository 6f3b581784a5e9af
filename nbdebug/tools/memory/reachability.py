"""What memory a thing holds on to, found without running any of the user's code.

Python's garbage collector can say what an object refers to (`gc.get_referents`): the items of a list, the attributes
of an object, the variables of a frame or a closure. No property, no `__getattr__` and no `__iter__` runs for it. Two
things it does not see are added: the gradient of a leaf, and what autograd's graph has saved for a backward.

A walk does not leave through modules, classes or the globals of a function: through these everything is reached.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nbdebug.observe.backward import input_nodes
from nbdebug.observe.variables import ATOMS, ShellPlaces, frame_variables, is_user_module, user_variables

MOST = 3_000_000
"""Objects visited in one walk; some seconds. A walk that stops there says so."""
STOPS = ("IPython", "ipykernel", "jupyter_client", "comm", "zmq", "tornado", "asyncio", "traitlets")
"""Packages whose objects lead to the shell, and through it to all else."""
Key = tuple[str, int]
TENSOR, ARRAY, NODE, FUNCTION, FRAME, TRACEBACK, STOP, ATOM, OTHER = range(9)

_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})
"""Most of what a data set's lists hold: left out first."""
_FRAMES = {types.FunctionType: FUNCTION, types.FrameType: FRAME, types.TracebackType: TRACEBACK}


class HeldBlock(NamedTuple):
    """Memory of one storage or array. gone: True once nothing holds it any longer; it holds nothing itself."""

    key: Key
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    gone: Callable[[], bool]

    @property
    def device(self) -> str:
        return self.key[0]

    def on(self, device: str) -> bool:
        """Whether it is on this device; a device without a number means any of its kind, "" any at all."""
        return device in ("", self.device, self.device.partition(":")[0])


class ReachabilityWalk:
    """One walk, or several over the same ground: what an earlier one has visited is not counted again.

    graphs: follow autograd's graph; tracebacks: follow the frames of exceptions. Where they are not followed, the ends
    of the graphs and the tracebacks are collected in `nodes` and `trails`. unknown: graph nodes whose saved tensors
    could not be seen; whole: False when a walk was given up because there is too much.
    """

    def __init__(
        self,
        *,
        graphs: bool = True,
        tracebacks: bool = True,
        stop: Iterable[Any] = (),
        after: ReachabilityWalk | None = None,
    ) -> None:
        self.graphs, self.tracebacks = graphs, tracebacks
        self.seen: set[int] = set(after.seen) if after else set()
        self.counted: set[Key] = set(after.counted) if after else set()
        self.known: set[Any] = set(after.known) if after else set()
        self.nodes: list[Any] = []
        self.trails: list[Any] = []
        self.unknown, self.whole = 0, True
        self._alive: list[Any] = []  # what was made on the way: its id must not be given to another
        self._stop = {id(thing) for thing in stop}
        self._kinds: dict[type, int] = {}

    def __call__(self, *roots: Any) -> list[HeldBlock]:
        """The memory that is reached from here and was not reached before."""
        blocks: dict[Key, HeldBlock] = {}
        todo, count = list(roots), 0
        while todo:
            thing = todo.pop()
            kind = self._kind(thing)
            if kind == ATOM or id(thing) in self.seen or id(thing) in self._stop:
                continue
            if self._left_aside(thing, kind):
                continue
            count += 1
            if count > MOST:
                self.whole = False
                break
            self.seen.add(id(thing))
            if kind in (TENSOR, ARRAY):
                for block in _blocks(thing) if kind == TENSOR else _array(thing):
                    if block.key not in self.counted:
                        self.counted.add(block.key)
                        blocks[block.key] = block
            todo += [behind for behind in self._behind(thing, kind) if type(behind) not in _LEAVES]
        return list(blocks.values())

    def take(self, tensors: Iterable[Any]) -> list[HeldBlock]:
        """The memory of these tensors alone, without what they refer to, that was not reached before."""
        blocks = [block for block in self.storages(tensors) if block.key not in self.counted]
        self.counted |= {block.key for block in blocks}
        return blocks

    def storages(self, tensors: Iterable[Any]) -> list[HeldBlock]:
        """The memory of these tensors alone, each storage once."""
        blocks = {block.key: block for tensor in tensors for block in _blocks(tensor)}
        return list(blocks.values())

    def _kind(self, thing: Any) -> int:
        kind = self._kinds.get(type(thing))
        if kind is None and issubclass(type(thing), type):  # of classes, the user's own are entered
            return OTHER if is_user_module(str(type.__getattribute__(thing, "__module__"))) else STOP
        if kind is None:
            kind = self._kinds[type(thing)] = _kind(type(thing))
        return kind

    def _left_aside(self, thing: Any, kind: int) -> bool:
        """Whether it is a graph or a traceback that this walk does not follow: noted, and not counted as seen."""
        if kind == TRACEBACK and not self.tracebacks:
            self.trails.append(thing)
        elif kind == NODE and not self.graphs:
            self.nodes.append(thing)
        else:
            return kind == FRAME and not self.tracebacks
        return True

    def _behind(self, thing: Any, kind: int) -> list[Any]:
        """What this one refers to."""
        if kind == STOP:
            return []
        if kind == FUNCTION:
            return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
        if kind == FRAME:  # not outwards: the frames that called it may run on, and theirs is the user's own
            return [r for r in gc.get_referents(thing) if type(r) is not types.FrameType and r is not thing.f_globals]
        if kind == NODE:
            return self._node(thing)
        return [*gc.get_referents(thing), *(self._tensor(thing) if kind == TENSOR else ())]

    def _tensor(self, tensor: Any) -> list[Any]:
        with torch._C.DisableTorchFunctionSubclass():
            node = tensor.grad_fn
            grad = tensor.grad if tensor.is_leaf else None
        self._alive += [part for part in (grad, node) if part is not None]
        return [grad, node]

    def _node(self, node: Any) -> list[Any]:
        """What a node of the graph has saved, and the nodes before it. A hook that unpacks is not run for it."""
        if node in self.known:
            return []
        self.known.add(node)  # node objects are made on demand: they are kept, for an id would be given away again
        saved: list[Any] = []
        for name in _saved_names(type(node)):
            try:
                raw = getattr(node, name)
            except RuntimeError:  # freed by a backward
                continue
            for one in raw if isinstance(raw, (tuple, list)) else (raw,):
                if hasattr(one, "data"):  # torch 2.7 and later
                    saved.append(one.data)
                else:
                    self.unknown += one is not None
        following = input_nodes(node)
        self._alive += [*saved, *following]
        leaf = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
        return [*saved, *following, leaf, *gc.get_referents(node)]


_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _saved_names(kind: type) -> tuple[str, ...]:
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
    return _names[kind]


def _kind(kind: type) -> int:
    if kind in _FRAMES:
        return _FRAMES[kind]
    if issubclass(kind, ATOMS):
        return ATOM
    if issubclass(kind, types.ModuleType):
        return STOP
    if issubclass(kind, torch.Tensor):
        return TENSOR
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return ARRAY
    if issubclass(kind, torch.autograd.Function) or _is_node(kind):
        return NODE
    package = str(type.__getattribute__(kind, "__module__")).partition(".")[0]
    return STOP if package in STOPS else OTHER


def _is_node(kind: type) -> bool:
    return any(name in kind.__dict__ for name in ("next_functions", "_raw_saved_tensors")) or any(
        "next_functions" in vars(parent) for parent in kind.__mro__
    )


def _blocks(tensor: Any) -> list[HeldBlock]:
    """The storages of a tensor: one, or of a sparse one those of its parts; none where no data lie behind it."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return [block for part in _parts(tensor) if (block := _block(part)) is not None]
    except (RuntimeError, NotImplementedError, TypeError):  # a wrapper without a storage: its parts are attributes
        return []


def _parts(tensor: Any) -> Iterable[Any]:
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    names = {
        torch.sparse_csr: "crow_indices col_indices",
        torch.sparse_bsr: "crow_indices col_indices",
        torch.sparse_csc: "ccol_indices row_indices",
        torch.sparse_bsc: "ccol_indices row_indices",
    }
    return (
        *(getattr(tensor, n)() for n in names.get(tensor.layout, "").split()),
        *((tensor.values(),) if tensor.layout in names else ()),
    )


def _block(tensor: Any) -> HeldBlock | None:
    storage = tensor.untyped_storage()
    count = storage.nbytes()
    if storage.device.type == "meta" or not count or not storage.data_ptr():
        return None
    weak = StorageWeakRef(storage)
    return HeldBlock(
        (str(storage.device), storage.data_ptr()),
        count,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        weak.expired,
    )


def _array(array: Any) -> list[HeldBlock]:
    """The memory of a numpy array, at the array or the tensor that owns it; none for one over other memory."""
    kind = sys.modules["numpy"].ndarray
    while not array.flags.owndata and type(array.base) is not None and isinstance(array.base, kind):
        array = array.base
    if not array.flags.owndata and isinstance(array.base, torch.Tensor):
        return list(_blocks(array.base))
    if not array.flags.owndata or not array.nbytes:
        return []
    try:
        weak = weakref.ref(array)
    except TypeError:
        return []
    return [
        HeldBlock(
            ("cpu", kind.__array_interface__.__get__(array)["data"][0]),
            int(array.nbytes),
            str(array.dtype),
            tuple(array.shape),
            lambda: weak() is None,
        )
    ]


def users_memory(
    names: Mapping[str, Any], places: ShellPlaces, caller: FrameType | None, without: Iterable[Any] = ()
) -> ReachabilityWalk:
    """A walk over what the user's own things hold, without graphs and tracebacks: these lie in its nodes and trails.
    caller: of nbdebug; without: what is to count as not held."""
    hidden = [names, *places.namespaces, places.outputs, places.shell]
    walk = ReachabilityWalk(graphs=False, tracebacks=False, stop=[t for t in [*hidden, *without] if t is not None])
    walk(*user_variables(names).values())
    for space in [vars(module) for module in _users_modules()] + list(_locals(caller)):
        if not any(space is thing for thing in hidden):
            walk(*user_variables(space).values())
    return walk


def _users_modules() -> list[Any]:
    """Modules of the user's own files: what their globals hold is held, whatever the notebook does."""
    return [
        module
        for name, module in list(sys.modules.items())
        if type(module) is type(sys) and name != "__main__" and is_user_module(name)
    ]


def _locals(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The variables of the user's functions that are running, from the caller outwards."""
    while frame is not None:
        if is_user_module(str(frame.f_globals.get("__name__", ""))):
            yield frame_variables(frame)
        frame = frame.f_back
