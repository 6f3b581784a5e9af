"""What a training step changes, remembered and put back, bit for bit.

    before = Snapshot.take(model, optimizer)
    step()
    before.restore()          # as if the step had not been
    before.differences()      # [] now; names such as "head.weight.grad" where something is not as it was

A model and its optimizer are a web of Python containers with tensors in it, and a tensor is a window on a piece of
memory. So the web is walked once, and four kinds of piece are kept: of a container its members; of a tensor where it
looks, its gradient and whether it wants one; of memory its bytes; of a source of random numbers its state. Each piece
knows how to put itself back. Whatever the step added is gone then (a parameter, the state that Adam makes in its first
step), whatever it replaced is there again, and as memory is copied once however many tensors look at it, tied weights
and aliasing buffers stay tied.

The walk goes through modules, optimizers, GradScalers, schedulers and plain containers; any other object that hangs on
them is left alone. Members are put back as they were at `take`: hooks that a module was given since then go too.
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

from nbdebug.observe.tensors import storage_bytes, strided_parts

_OWNERS = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # exactly these: a subclass may have rules of its own
_plainly = torch._C.DisableTorchFunctionSubclass  # an uninitialized parameter refuses to be looked at otherwise
_UNNAMED = ("_parameters", "_buffers", "_modules")  # "head.weight", not "_modules.head._parameters.weight"


class Snapshot:
    """The state of models and optimizers at one moment, and of the random numbers. Costs one copy of their memory."""

    def __init__(self) -> None:
        self._pieces: list[_SnapshotPart] = []
        self._seen: dict[int, tuple[str, Any]] = {}  # by id; holding the thing keeps its id from being used again
        self._memory: set[int] = set()

    @classmethod
    def take(
        cls, models: Any, optimizers: Any = (), *, devices: Iterable[Any] | None = None, others: Iterable[Any] = ()
    ) -> Snapshot:
        """Remember everything. `models`: a Module, several, or a dict name → Module; `others`: GradScalers, schedulers.

        `devices`: those whose random numbers count, beside the CPU; None means every accelerator in use.
        """
        snapshot = cls()
        for name, thing in (*_named(models, "model"), *_named(optimizers, "optimizer"), *_named(others, "other")):
            if not isinstance(thing, _OWNERS):
                raise TypeError(f"A snapshot takes modules, optimizers, GradScalers and schedulers; got {thing!r}")
            with _plainly():
                snapshot._walk(name, thing)
        snapshot._pieces += [_Random(*source) for source in random_sources(devices)]
        return snapshot

    def restore(self) -> None:
        """Put everything back, in place: the same objects hold the same bits as at `take`."""
        with _plainly():
            for piece in reversed(self._pieces):  # a gradient comes after its tensor, and has to fit when it is set
                piece.restore()

    def differences(self) -> list[str]:
        """The names of what has changed since `take`, each once."""
        with _plainly():
            return list(dict.fromkeys(name for piece in self._pieces for name in piece.changes()))

    def same_as_now(self) -> bool:
        """Whether nothing has changed since `take`, to the last bit."""
        with _plainly():
            return all(next(iter(piece.changes()), None) is None for piece in self._pieces)

    def _walk(self, name: str, root: Any) -> None:
        todo = [(name, root)]
        while todo:  # no recursion: a chain of containers may be long
            name, thing = todo.pop()
            if id(thing) not in self._seen and (inside := self._keep(name, thing)) is not None:
                self._seen[id(thing)] = name, thing
                todo += reversed(inside)

    def _keep(self, name: str, thing: Any) -> list[tuple[str, Any]] | None:
        """Keep the piece that `thing` is, and say what lies inside; None when it is nothing that a step changes."""
        if isinstance(thing, torch.Tensor):
            return self._keep_tensor(name, thing)
        if isinstance(thing, _OWNERS):
            self._pieces.append(_ClassSnapshot(name, thing))
            return [(name, thing.__dict__)]
        if type(thing) in _CONTAINERS:
            self._pieces.append(_Members(name, thing, self._join))
            return [(self._join(name, key), value) for key, value in _members(thing)]
        if isinstance(thing, tuple):
            return [(self._join(name, i), value) for i, value in enumerate(thing)]
        if isinstance(thing, torch.Generator):
            self._pieces.append(_Random(name, thing.get_state, thing.set_state))
            return []
        return None

    def _keep_tensor(self, name: str, tensor: torch.Tensor) -> list[tuple[str, Any]]:
        window = _Window(name, tensor)
        self._pieces.append(window)
        for part in strided_parts(window.data):
            memory = part.untyped_storage()
            if memory.data_ptr() and memory.data_ptr() not in self._memory:  # 0 on "meta", and where it is empty
                self._memory.add(memory.data_ptr())
                self._pieces.append(_MemorySnapshot(name, memory))
        return [] if window.grad is None else [(f"{name}.grad", window.grad)]

    def _join(self, name: str, key: Any) -> str:
        if isinstance(key, str):
            return name if key in _UNNAMED else f"{name}.{key}" if name else key
        if isinstance(key, torch.Tensor):  # optimizer state is kept by parameter: say which
            return f"{name}[{self._seen.get(id(key), ('a tensor',))[0]}]"
        return f"{name}[{key}]"


class _SnapshotPart(Protocol):
    def restore(self) -> None: ...

    def changes(self) -> Iterable[str]: ...


class _ClassSnapshot:
    """The class of an object: a lazy module becomes an ordinary one when it first runs."""

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing, self.kind = name, thing, type(thing)

    def restore(self) -> None:
        if self.changes():
            self.thing.__class__ = self.kind

    def changes(self) -> list[str]:
        return [] if type(self.thing) is self.kind else [f"{self.name} (its class)"]


class _Members:
    """What is in a container, in which order."""

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


class _Window:
    """Where a tensor looks, what its gradient is, and whether it wants one."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.kind = _ClassSnapshot(name, tensor)
        self.data = tensor.data  # an alias: it keeps the memory from being freed when the step sets `.data`
        self.leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        self.kind.restore()
        tensor = self.tensor
        if self.leaf and not tensor.is_leaf:  # a buffer that was updated in place with something that needs gradients
            tensor.detach_()
        if _place(tensor.data) != _place(self.data):
            tensor.data = self.data
        if self.leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if self.leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad

    def changes(self) -> Iterator[str]:
        yield from self.kind.changes()
        if _place(self.tensor.data) != _place(self.data):
            yield self.name
        if (self.tensor.is_leaf, self.tensor.requires_grad) != (self.leaf, self.requires_grad):
            yield f"{self.name}.requires_grad"
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            yield f"{self.name}.grad"


class _MemorySnapshot:
    """The bytes of a piece of memory."""

    def __init__(self, name: str, memory: torch.UntypedStorage) -> None:
        self.name, self.memory, self.before = name, memory, memory.clone()

    def restore(self) -> None:
        if self.memory.nbytes() != self.before.nbytes():  # a sharded module frees its memory between uses
            self.memory.resize_(self.before.nbytes())
        self.memory.copy_(self.before)

    def changes(self) -> list[str]:
        same_size = self.memory.nbytes() == self.before.nbytes()
        same = same_size and torch.equal(storage_bytes(self.memory), storage_bytes(self.before))
        return [] if same else [self.name]


class _Random:
    """The state of a source of random numbers."""

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.name, self.read, self.write, self.before = name, read, write, read()

    def restore(self) -> None:
        self.write(self.before)

    def changes(self) -> list[str]:
        return [] if comparable_state(self.read()) == comparable_state(self.before) else [self.name]


def random_sources(
    devices: Iterable[Any] | None = None,
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The global sources of random numbers: name, how to read the state, how to set it."""
    yield "Python's random numbers", random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "NumPy's random numbers", numpy.random.get_state, numpy.random.set_state
    yield "torch's random numbers", torch.get_rng_state, torch.set_rng_state
    for device in accelerators_in_use() if devices is None else map(torch.device, devices):
        if device.type not in ("cpu", "meta"):
            yield f"the random numbers of {device}", *_accelerator(device)


def accelerators_in_use() -> list[torch.device]:
    """Every accelerator that has been used; one that has not is not woken up."""
    kinds = [(kind, getattr(torch, kind)) for kind in ("cuda", "xpu")]
    found = [
        torch.device(kind, i) for kind, module in kinds if module.is_initialized() for i in range(module.device_count())
    ]
    return found + ([torch.device("mps")] if torch.backends.mps.is_available() else [])


def _accelerator(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    module: Any = torch.get_device_module(device)
    if device.type == "mps":  # there is one such device, and its functions take none
        return module.get_rng_state, module.set_rng_state
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def comparable_state(state: Any) -> Any:
    """A generator's state as something that `==` compares."""
    if isinstance(state, (tuple, list)):
        return tuple(map(comparable_state, state))
    return bytes(state.tolist()) if isinstance(state, torch.Tensor) else getattr(state, "tobytes", lambda: state)()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor looks, and how it reads what is there."""
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
    """Things with names: those of a dict, or their kind, numbered where there are several."""
    if isinstance(things, Mapping):
        return list(things.items())
    things = [things] if isinstance(things, _OWNERS) else list(things)
    return [(kind if len(things) == 1 else f"{kind}[{i}]", thing) for i, thing in enumerate(things)]


class CallEnvironment:
    """How things stood when a model was called: random numbers, autocast, the train flag."""

    def __init__(self, model: nn.Module) -> None:
        self.random = [(write, read()) for _, read, write in random_sources()]
        kinds = {"cpu"} | {p.device.type for p in _first(model)}
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
        self.training = model.training

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        flags = {m: m.training for m in model.modules()} if model.training != self.training else {}
        if flags:
            model.train(self.training)
        for write, state in self.random:
            write(state)
        try:
            with contextlib.ExitStack() as stack:
                for kind, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                yield
        finally:
            for module, flag in flags.items():
                module.training = flag


def _first(model: nn.Module) -> Iterator[torch.Tensor]:
    parameter = next(model.parameters(), None)
    if parameter is not None:
        yield parameter
