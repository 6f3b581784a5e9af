"""From the user's names to all that they lead to: each storage gets every name that leads to it, and one owner.

The walk goes breadth first, so that a thing has its shortest name, and first through what comes first in facts.KINDS.
A storage may be reached by several names; its owner is the first of them in the order of KINDS, the nearest of those.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch

from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.variables import attributes, is_user_module, user_variables
from nbdebug.report import Where
from nbdebug.tools.memory.facts import KINDS, NOWHERE
from nbdebug.tools.memory.owners.contents import ATOMS, CROWD, HOOK, parts, variables
from nbdebug.tools.memory.owners.storages import Key, StorageView, array_pieces, pieces
from nbdebug.tools.memory.reachability import STOPS

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
        if type(value) not in ATOMS and id(value) not in self._stop:
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

    def owners(self, storages: Iterable[StorageView]) -> list[Owned]:
        """Who holds these, as far as the walk has found it."""
        return [self.record(piece) for piece in storages]

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
            elif key not in _QUIET and type(value) not in ATOMS:
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
            if key != "param_groups":
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
    if kind in ATOMS:
        return STOP
    package = str(type.__getattribute__(kind, "__module__")).partition(".")[0]
    return STOP if package in STOPS else OTHER
