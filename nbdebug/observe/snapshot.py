"""Snapshots: the state that a training step changes, saved and restored bit for bit.

    before = Snapshot.take(model, optimizer)
    step()
    before.restore()          # as if the step had not run
    before.differences()      # [] now; names such as "head.weight.grad" where something differs

A model and its optimizer are a graph of Python containers with tensors in it, and a tensor is a view of a storage. So
the graph is walked once, and four kinds of parts are saved: the members of a container; the view, the gradient and the
`requires_grad` of a tensor; the bytes of a storage; the state of a random number generator. Each part can restore
itself. This removes what the step added (a parameter, the state that Adam makes in its first step) and brings back what
it replaced. A storage is copied once however many tensors view it, so tied weights and aliasing buffers stay tied.

The walk goes through modules, optimizers, GradScalers, schedulers and plain containers; other objects that they refer
to are left alone. Members are restored as they were at `take`: hooks that were registered since then are removed too.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from nbdebug.interrupts import uninterrupted
from nbdebug.observe.tensors import storage_bytes, strided_parts

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

    @uninterrupted
    def restore(self) -> None:
        """Restore everything in place: the same objects hold the same bits as at `take`."""
        with _plainly():
            for part in reversed(self._parts):  # a gradient comes after its tensor, and has to fit when it is set
                part.restore()

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
        if isinstance(thing, torch.Tensor):
            return self._save_tensor(name, thing)
        if isinstance(thing, _OWNERS):
            self._parts.append(_Class(name, thing))
            return [(name, thing.__dict__)]
        if type(thing) in _CONTAINERS:
            self._parts.append(_Members(name, thing, self._join))
            return [(self._join(name, key), value) for key, value in _members(thing)]
        if isinstance(thing, tuple):
            return [(self._join(name, i), value) for i, value in enumerate(thing)]
        if isinstance(thing, torch.Generator):
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
        same = same_size and torch.equal(storage_bytes(self.storage), storage_bytes(self.before))
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
        flags = {m: m.training for m in model.modules()} if model.training != self.training else {}
        if flags:
            model.train(self.training)
        for write, state in self.random:
            write(state)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(self.grad))
                for kind, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                yield
        finally:
            for module, flag in flags.items():
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
