"""Snapshots: the state that a training step changes, and what the step itself starts from, restored bit for bit.

    before = Snapshot.take(model, optimizer)
    step()
    before.restore()          # as if the step had not run
    before.differences()      # [] now; names such as "head.weight.grad" where something differs

    before = StepState.take(step, models, optimizers)
    step()
    before.restore(); step()  # the same step once more, on copies of its iterators

A model and its optimizer are a graph of Python containers with tensors in it, and a tensor is a view of a storage. So
the graph is walked once, and four kinds of parts are saved: the members of a container; the view, the gradient and the
`requires_grad` of a tensor; the bytes of a storage; the state of a random number generator. Each part can restore
itself. This removes what the step added (a parameter, the state that Adam makes in its first step) and brings back what
it replaced. A storage is copied once however many tensors view it, so tied weights and aliasing buffers stay tied.

The walk goes through modules, optimizers, GradScalers, schedulers and plain containers; other objects that they refer
to are left alone. Members are restored as they were at `take`: hooks that were registered since then are removed too.

A `StepState` adds the variables that the step's own code uses. A step that uses something of which this is not known (a
writer, an open file, a generator, hooks) is not run again: `why_not` names it. Iterators of Python's own kinds can be
copied; the copies advance, the user's own stay where they are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from nbdebug.interrupts import uninterrupted
from nbdebug.observe.locations import USER, kind_of
from nbdebug.observe.tensors import storage_bytes, strided_parts
from nbdebug.observe.variables import MODULES_OWN, is_user_module
from nbdebug.text import module_name

_OWNERS = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # exactly these: a subclass may behave differently
_plainly = torch._C.DisableTorchFunctionSubclass  # else an uninitialized parameter can't be read
_UNNAMED = ("_parameters", "_buffers", "_modules")  # "head.weight", not "_modules.head._parameters.weight"


class Snapshot:
    """The state of models, optimizers and random numbers at one moment. Costs one copy of their memory."""

    def __init__(self) -> None:
        self._parts: list[_SnapshotPart] = []
        self._visited: dict[int, tuple[str, Any]] = {}  # by id; the reference keeps the id from being used again
        self._storages: set[int] = set()

    @classmethod
    def take(
        cls, models: Any, optimizers: Any = (), *, devices: Iterable[Any] | None = None, others: Iterable[Any] = ()
    ) -> Snapshot:
        """Save everything. `models`: a Module, several, or a dict name → Module; `others`: GradScalers, schedulers;
        `devices`: whose random numbers are saved beside the CPU's, None for every accelerator in use.

        Raises TypeError for anything else."""
        snapshot = cls()
        for name, thing in (*_named(models, "model"), *_named(optimizers, "optimizer"), *_named(others, "other")):
            if not isinstance(thing, _OWNERS):
                raise TypeError(f"A snapshot takes modules, optimizers, GradScalers and schedulers; got {thing!r}")
            with _plainly():
                snapshot._walk(name, thing)
        snapshot._parts += [_RandomState(*source) for source in random_sources(devices)]
        return snapshot

    def include(self, optimizer: torch.optim.Optimizer) -> None:
        """Save an optimizer that did not exist yet at `take`, as it is now; of its parameters those that are new."""
        with _plainly():
            self._walk("optimizer", optimizer)

    @uninterrupted
    def restore(self) -> None:
        """Restore everything in place: the same objects hold the same bits as at `take`."""
        with _plainly():
            for part in reversed(self._parts):  # a gradient comes after its tensor, and has to fit when it is set
                part.restore()

    def move_to_host(self) -> None:
        """Keep the saved bytes in the host's memory: a device has more room for other things then."""
        for part in self._parts:
            if isinstance(part, _StorageBytes):
                part.before = part.before.cpu()

    def differences(self) -> list[str]:
        """The names of what has changed since `take`, each once."""
        with _plainly():
            return list(dict.fromkeys(name for part in self._parts for name in part.changes()))

    def _walk(self, name: str, root: Any) -> None:
        todo = [(name, root)]
        while todo:  # no recursion: a chain of containers may be long
            name, thing = todo.pop()
            if id(thing) not in self._visited and (members := self._save(name, thing)) is not None:
                self._visited[id(thing)] = name, thing
                todo += reversed(members)

    def _save(self, name: str, thing: Any) -> list[tuple[str, Any]] | None:
        """Save this part, and return what it contains; None for what no step changes."""
        kind = type(thing)  # isinstance would ask the object for its class
        if issubclass(kind, torch.Tensor):
            return self._save_tensor(name, thing)
        if issubclass(kind, _OWNERS):
            self._parts.append(_Class(name, thing))
            return [(name, thing.__dict__)]
        if kind in _CONTAINERS:
            self._parts.append(_Members(name, thing, self._join))
            return [(self._join(name, key), value) for key, value in _members(thing)]
        if issubclass(kind, tuple):
            return [(self._join(name, i), value) for i, value in enumerate(tuple.__iter__(thing))]
        if issubclass(kind, torch.Generator):
            self._parts.append(_RandomState(name, thing.get_state, thing.set_state))
            return []
        return None

    def _save_tensor(self, name: str, tensor: torch.Tensor) -> list[tuple[str, Any]]:
        view = _TensorView(name, tensor)
        self._parts.append(view)
        for part in strided_parts(view.data):
            storage = part.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in self._storages:  # 0 on "meta", and where it is empty
                self._storages.add(storage.data_ptr())
                self._parts.append(_StorageBytes(name, storage))
        return [] if view.grad is None else [(f"{name}.grad", view.grad)]

    def _join(self, name: str, key: Any) -> str:
        if isinstance(key, str):
            return name if key in _UNNAMED else f"{name}.{key}" if name else key
        if isinstance(key, torch.Tensor):  # optimizer state has parameters as keys
            return f"{name}[{self._visited.get(id(key), ('a tensor',))[0]}]"
        return f"{name}[{key}]"


class _SnapshotPart(Protocol):
    def restore(self) -> None: ...

    def changes(self) -> Iterable[str]: ...


class _Class:
    """The class of an object: a lazy module becomes an ordinary one when it first runs."""

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing, self.kind = name, thing, type(thing)

    def restore(self) -> None:
        if self.changes():
            self.thing.__class__ = self.kind

    def changes(self) -> list[str]:
        return [] if type(self.thing) is self.kind else [f"{self.name} (its class)"]


class _Members:
    """The members of a container, in order."""

    def __init__(self, name: str, container: Any, join: Callable[[str, Any], str]) -> None:
        self.name, self.container, self.join, self.before = name, container, join, _members(container)

    def restore(self) -> None:
        if not _same_members(self.before, _members(self.container)):
            self.container.clear()
            if isinstance(self.container, dict):
                self.container.update(self.before)
            elif isinstance(self.container, set):
                self.container.update(key for key, _ in self.before)
            else:
                self.container.extend(value for _, value in self.before)

    def changes(self) -> Iterator[str]:
        now = _members(self.container)
        if not _same_members(self.before, now):
            old, new = ({self.join(self.name, key): value for key, value in pairs} for pairs in (self.before, now))
            changed = [k for k in {**old, **new} if k not in old or k not in new or not _same(old[k], new[k])]
            yield from changed or [f"{self.name} (its order)"]


class _TensorView:
    """A tensor's view of its storage, its gradient, and whether it needs one."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.kind = _Class(name, tensor)
        self.data = tensor.data  # an alias: it keeps the storage alive when the step sets `.data`
        self.leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        self.kind.restore()
        tensor = self.tensor
        if self.leaf and not tensor.is_leaf:  # a buffer that was updated in place with a tensor that needs a gradient
            tensor.detach_()
        if _view(tensor.data) != _view(self.data):
            tensor.data = self.data
        if self.leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if self.leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad

    def changes(self) -> Iterator[str]:
        yield from self.kind.changes()
        if _view(self.tensor.data) != _view(self.data):
            yield self.name
        if (self.tensor.is_leaf, self.tensor.requires_grad) != (self.leaf, self.requires_grad):
            yield f"{self.name}.requires_grad"
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            yield f"{self.name}.grad"


class _StorageBytes:
    """The bytes of a storage."""

    def __init__(self, name: str, storage: torch.UntypedStorage) -> None:
        self.name, self.storage, self.before = name, storage, storage.clone()

    def restore(self) -> None:
        if self.storage.nbytes() != self.before.nbytes():  # a sharded module frees its memory between uses
            self.storage.resize_(self.before.nbytes())
        self.storage.copy_(self.before)

    def changes(self) -> list[str]:
        same_size = self.storage.nbytes() == self.before.nbytes()
        same = same_size and torch.equal(storage_bytes(self.storage).to(self.before.device), storage_bytes(self.before))
        return [] if same else [self.name]


class _RandomState:
    """The state of a random number generator."""

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.name, self.read, self.write, self.before = name, read, write, read()

    def restore(self) -> None:
        self.write(self.before)

    def changes(self) -> list[str]:
        return [] if comparable_state(self.read()) == comparable_state(self.before) else [self.name]


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which storage a tensor views, and how."""
    return (
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.layout == torch.sparse_coo and tensor.is_coalesced(),
        *((part.data_ptr(), part.shape, part.stride()) for part in strided_parts(tensor)),
    )


def _members(container: Any) -> list[tuple[Any, Any]]:
    """A container as pairs: (key, value) of a dict, (element, None) of a set, (position, element) of a list."""
    if isinstance(container, dict):
        return list(container.items())
    return [(x, None) for x in container] if isinstance(container, set) else list(enumerate(container))


def _same_members(before: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    return len(before) == len(now) and all(map(_same, before, now))


def _same(a: Any, b: Any) -> bool:
    """The same object, or equal plain values. Two tensors are not the same, whatever is in them."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, (tuple, int, float, complex, str, bytes)):
        return False
    return all(map(_same, a, b)) and len(a) == len(b) if isinstance(a, tuple) else a == b or a != a != b


def _named(things: Any, kind: str) -> list[tuple[str, Any]]:
    """Things by name: the keys of a dict, or else the kind, numbered where there are several."""
    if isinstance(things, Mapping):
        return list(things.items())
    things = [things] if isinstance(things, _OWNERS) else list(things)
    return [(kind if len(things) == 1 else f"{kind}[{i}]", thing) for i, thing in enumerate(things)]


class CallEnvironment:
    """The environment in which a model was called: random numbers, autocast, grad mode, the train flag. Calling it
    with the model restores that environment for the length of a `with`."""

    def __init__(self, model: nn.Module) -> None:
        self.random = [(write, read()) for _, read, write in random_sources()]
        first = next(model.parameters(), None)
        kinds = {"cpu"} if first is None else {"cpu", first.device.type}
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
        self.training, self.grad = model.training, torch.is_grad_enabled()

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if model.training != self.training:
                stack.enter_context(modes_put_back(model))
                model.train(self.training)
            for write, state in self.random:
                write(state)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


@contextlib.contextmanager
def modes_put_back(model: nn.Module) -> Iterator[None]:
    """Train and eval mode of each module are afterwards as they were."""
    flags = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def random_sources(
    devices: Iterable[Any] | None = None,
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The global random number generators: name, a function that reads the state, and one that sets it."""
    yield "Python's random numbers", random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "NumPy's random numbers", numpy.random.get_state, numpy.random.set_state
    yield "torch's random numbers", torch.get_rng_state, torch.set_rng_state
    for device in accelerators_in_use() if devices is None else map(torch.device, devices):
        if device.type not in ("cpu", "meta"):
            yield f"the random numbers of {device}", *_accelerator(device)


def random_states(devices: Iterable[Any] | None = None) -> dict[str, Any]:
    """The states of these generators, tensors and plain values, by the beginnings of their names: "torch"."""
    states = {name.partition("'")[0]: read() for name, read, _ in random_sources(devices)}
    if "NumPy" in states:
        name, keys, *rest = states["NumPy"]
        states["NumPy"] = (name, keys.tolist(), *rest)
    return states


def set_random_states(states: Mapping[str, Any], devices: Iterable[Any] | None = None) -> None:
    """Set those that are given and are in use here."""
    for name, _, write in random_sources(devices) if states else ():
        if (key := name.partition("'")[0]) in states:
            write(states[key])


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """All of these generators are as before afterwards."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@contextlib.contextmanager
def own_random_numbers(loader: Any) -> Iterator[None]:
    """The same; and those of a loader and its samplers, too."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    generators: list[Any] = [getattr(holder, "generator", None) for holder in holders]
    states = [(generator, generator.get_state()) for generator in generators if hasattr(generator, "get_state")]
    with same_random_numbers():
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def accelerators_in_use() -> list[torch.device]:
    """Every accelerator that has been used; one that has not is not initialized."""
    kinds = [(kind, getattr(torch, kind)) for kind in ("cuda", "xpu")]
    devices = [
        torch.device(kind, i) for kind, module in kinds if module.is_initialized() for i in range(module.device_count())
    ]
    return devices + ([torch.device("mps")] if torch.backends.mps.is_available() else [])


def _accelerator(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    module: Any = torch.get_device_module(device)
    if device.type == "mps":  # there is one such device: its functions take no argument
        return module.get_rng_state, module.set_rng_state
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def comparable_state(state: Any) -> Any:
    """A generator's state as something that `==` compares."""
    if isinstance(state, (tuple, list)):
        return tuple(map(comparable_state, state))
    return bytes(state.tolist()) if isinstance(state, torch.Tensor) else getattr(state, "tobytes", lambda: state)()


# -- what the user's own step starts from ------------------------------------------------------------------------------


_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_REFILLED = (list, dict, set)
_EMPTY: tuple[Any, ...] = ([], (), range(0), "", {}, set(), {}.items(), {}.values(), b"")
_ITERATORS = (zip, enumerate, map, filter, reversed, type(reversed([])), *{type(iter(thing)) for thing in _EMPTY})
_WRITERS = frozenset({"open", "save", "savez", "to_csv", "imsave", "savefig"})
_OUTSIDE = _WRITERS | {"input", "system"}
"""Calls that leave the process: a step that makes one is not run again."""
_REACH_OUT = (
    "os shutil subprocess socket ssl http urllib ftplib smtplib sqlite3 logging asyncio multiprocessing threading"
)
_KNOWN = frozenset(
    {"torch", "numpy", "pandas", "einops", "nbdebug", *sys.stdlib_module_names.difference(_REACH_OUT.split())}
)
"""Packages whose functions leave nothing outside of what is saved here."""
_MOST = 500
"""Variables and members that are looked at: a step uses tens."""


class StepState:
    """See the module's docstring. why_not: why the step can't run again, or ""."""

    def __init__(self) -> None:
        self.why_not = ""
        self._outside: frozenset[str] = _OUTSIDE
        self.snapshot: Snapshot | None = None
        self._visited: dict[int, Any] = {}
        self._undo: list[Callable[[], Any]] = []
        self._iterators: list[tuple[Callable[[Any], Any], Any, Any]] = []  # how it is set, itself, a copy

    @classmethod
    def take(
        cls,
        step: Callable[[], Any],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        others: Iterable[Any] = (),
        writes: bool = False,
    ) -> StepState:
        """Save what the step starts from. Costs one copy of the memory of models and optimizers. writes: whether it
        may write files, since the caller sends them elsewhere."""
        state = cls()
        state._outside = _OUTSIDE - _WRITERS if writes else _OUTSIDE
        try:
            state._visit("the step", step, None)
            for name, model in models.items():
                state._visit(name, model, None)
            if not state.why_not:
                state.snapshot = Snapshot.take(models, optimizers, others=others)
        except Exception as fault:  # of the user's objects, which are only read
            state.why_not = f"its variables can't be read ({type(fault).__name__})"
        return state

    def restore(self) -> None:
        """As it was at `take`; iterators are copies that give the same again."""
        self._put_back()
        for put, _, saved in self._iterators:
            put(_copied(saved))

    def leave(self) -> None:
        """As it was at `take`, with the user's own iterators."""
        self._put_back()
        for put, own, _ in self._iterators:
            put(own)

    def _put_back(self) -> None:
        assert self.snapshot is not None, "the step can run again"
        self.snapshot.restore()
        for undo in self._undo:
            undo()

    # -- what the step uses -------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any, put: Callable[[Any], Any] | None) -> None:
        kind = type(value)  # and no isinstance: a class of the user's may answer that as it likes
        if self.why_not or issubclass(kind, (torch.Tensor, types.BuiltinFunctionType, property)):
            return
        if issubclass(kind, _ATOMS):
            if put is not None:
                self._undo.append(functools.partial(put, value))
            return
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if len(self._visited) > _MOST:
            self.why_not = "it uses too many variables"
        else:
            self._thing(name, value, put)

    def _thing(self, name: str, value: Any, put: Callable[[Any], Any] | None) -> None:
        kind = type(value)
        if kind is types.FunctionType:
            self._function(name, value)
        elif kind in (types.MethodType, functools.partial):
            parts = (value.__self__, value.__func__) if kind is types.MethodType else (value.func,)
            for part in (*parts, *getattr(value, "args", ()), *getattr(value, "keywords", {}).values()):
                self._visit(name, part, None)
        elif issubclass(kind, _OWNERS):
            self._owner(name, value)
        elif kind in _ITERATORS:
            self._iterator(name, value, put)
        elif kind in _REFILLED or issubclass(kind, tuple):
            self._container(name, value)
        else:
            self._other(name, value)

    def _function(self, name: str, function: types.FunctionType) -> None:
        code = function.__code__
        own = kind_of(code) == USER or code.co_name == "<lambda>"
        if not own:
            made = code.co_filename == "<string>" and code.co_name.startswith("__")  # by `dataclass`, `namedtuple`
            home = str(function.__globals__.get("__name__")).partition(".")[0]  # of a decorator too
            if home not in _KNOWN and not made:
                self.why_not = f"it calls `{name}` of {_home(function)}"
            if home == _home(function) or made:
                return
        cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]  # those that are not empty
        lines = [cell.cell_contents for cell in cells if type(cell.cell_contents) is types.CodeType]
        if lines:  # of a magic: the code of the line that was typed, and the user's variables
            spaces = [cell.cell_contents for cell in cells if type(cell.cell_contents) is dict]
            self._code(lines[0], spaces[0] if spaces else {})
            return
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if any(cell is full for full in cells):
                self._visit(variable, cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(name, default, None)
        if own:
            self._code(code, function.__globals__)

    def _code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        for used in code.co_names:
            if used in self._outside:
                self.why_not = f"it calls `{used}`"
            elif used in names:
                self._visit(used, names[used], functools.partial(names.__setitem__, used))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names)

    def _owner(self, name: str, owner: Any) -> None:
        for part in owner.modules() if isinstance(owner, nn.Module) else ():
            self._visited[id(part)] = part
            if _home(type(part)) == "torch":
                continue
            self._methods(name, type(part))
            for key, value in vars(part).items():
                if key not in MODULES_OWN and not isinstance(value, _OWNERS):
                    self._visit(f"{name}.{key}", value, functools.partial(vars(part).__setitem__, key))

    def _methods(self, name: str, kind: type) -> None:
        if id(kind) not in self._visited:
            self._visited[id(kind)] = kind
            for method in [m for m in vars(kind).values() if isinstance(m, types.FunctionType)]:
                if method.__name__ != "__init__":
                    self._visit(name, method, None)

    def _iterator(self, name: str, iterator: Any, put: Callable[[Any], Any] | None) -> None:
        try:
            if put is None:
                raise TypeError("it stands where it can't be exchanged")
            self._iterators.append((put, iterator, _copied(iterator)))
            if type(iterator) in (map, filter):
                self._visit(name, iterator.__reduce__()[1][0], None)
        except TypeError:
            self.why_not = f"`{name}` can't be wound back"

    def _container(self, name: str, container: Any) -> None:
        if isinstance(container, dict):
            members = [*container.items()]
        elif isinstance(container, (list, tuple)):
            members = [*enumerate(container)]
        else:
            members = [(None, value) for value in container]
        changes = isinstance(container, (list, dict))
        if isinstance(container, _REFILLED):
            self._undo.append(functools.partial(_refill, container, copy.copy(container)))
        for key, value in members[:_MOST] if not isinstance(members[0][1] if members else None, _ATOMS) else ():
            self._visit(f"{name}[{key!r}]", value, functools.partial(container.__setitem__, key) if changes else None)

    def _other(self, name: str, value: Any) -> None:
        kind = type(value)
        iterates = hasattr(kind, "__next__")
        if issubclass(kind, (torch.Generator, random.Random, *_numpy("random.Generator"))):
            self._generator(value)
        elif kind is types.ModuleType:
            if value.__name__.partition(".")[0] not in _KNOWN:
                self.why_not = f"it uses the module `{value.__name__}`"
        elif issubclass(kind, type):
            if is_user_module(value.__module__):
                self._methods(name, value)
            elif _home(value) not in _KNOWN:
                self.why_not = f"it uses `{name}` of {_home(value)}"
        elif not iterates and (kind is types.SimpleNamespace or is_user_module(module_name(kind))):
            self._methods(name, kind)
            members = object.__getattribute__(value, "__dict__")
            self._undo.append(functools.partial(_refill, members, dict(members)))
            for key, member in list(members.items()):
                self._visit(f"{name}.{key}", member, functools.partial(members.__setitem__, key))
        elif iterates or not (
            _home(kind) in ("torch", "pandas") or issubclass(kind, (types.CodeType, *_numpy("ndarray", "generic")))
        ):
            self.why_not = f"`{name}` ({kind.__name__}) can't be wound back"

    def _generator(self, value: Any) -> None:
        if issubclass(type(value), torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif issubclass(type(value), random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        else:
            self._undo.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))


def _home(thing: Any) -> str:
    """The package of a class or function."""
    return str(thing.__module__).partition(".")[0]


def _copied(iterator: Any) -> Any:
    """A copy that gives the same, of an iterator of Python's own kinds, with those inside it. Raises TypeError."""
    if type(iterator) not in _ITERATORS:
        return iterator
    make, parts, *state = iterator.__reduce__()
    if make is iter:  # the list itself and a place in it
        copied = make(*parts)
    else:
        for part in parts:
            if hasattr(part, "__next__") and type(part) not in _ITERATORS:
                raise TypeError(f"{type(part).__name__} can't be copied")
        copied = make(*map(_copied, parts))
    if state and state[0] is not None:
        copied.__setstate__(state[0])
    return copied


def _refill(container: Any, before: Any) -> None:
    container.clear()
    container.extend(before) if isinstance(container, list) else container.update(before)


def _numpy(*names: str) -> list[type]:
    """Classes of numpy, where it is imported."""
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [operator.attrgetter(name)(numpy) for name in names]


def has_hooks(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> bool:
    """Whether somebody watches these: a step that runs again would be seen twice."""
    modules = [part for model in models.values() for part in model.modules()]
    return (
        bool(torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_forward_pre_hooks)
        or any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in modules)
        or any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in optimizers.values())
    )
