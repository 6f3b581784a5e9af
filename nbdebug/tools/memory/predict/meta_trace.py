"""A training step over tensors without data: each block of memory with its allocation, its end, its size and its use.

A dispatch mode sees each op below autograd, as a kernel would. A result whose storage is new is an allocation; the
storage's own end frees it. What a kernel takes besides its results is added by `workspaces`, right after the results,
and freed before the next op.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PHASES = ("start", "zero_grad", "forward", "backward", "optimizer")
Workspaces = Callable[[Any, Sequence[Any], Any, "MetaRecorder"], Sequence["Extra"]]


@dataclasses.dataclass(frozen=True)
class Extra:
    """Memory that a kernel takes besides its results. after: behind how many of the results it comes; kept: it stays
    for good (a library's workspace)."""

    bytes: int
    after: int = 99
    kept: bool = False


@dataclasses.dataclass(slots=True)
class PredictedBlock:
    """One piece of memory. step: 0-based; phase: index into PHASES; category: one of facts.CATEGORIES, once known."""

    size: int
    step: int
    phase: int
    module: str
    op: str
    category: str = ""


@dataclasses.dataclass
class Trace:
    """events: number of an allocated block, or its complement (~number) where it is freed, in order; marks:
    (step, phase, index of the first event)."""

    blocks: list[PredictedBlock]
    events: array.array[int]
    marks: list[tuple[int, int, int]]

    def replay(self, sizes: Sequence[int] | None = None) -> Peak:
        """Live bytes over the events. sizes: of each block, where they shall be others than those that were seen."""
        sizes = [b.size for b in self.blocks] if sizes is None else sizes
        now, best, place = 0, 0, -1
        for at, number in enumerate(self.events):
            now += sizes[number] if number >= 0 else -sizes[~number]
            if now > best:
                best, place = now, at
        return Peak(best, place)

    def alive(self, place: int) -> list[int]:
        """Numbers of the blocks that are alive right after an event."""
        live: dict[int, None] = {}
        for number in self.events[: place + 1]:
            if number >= 0:
                live[number] = None
            else:
                live.pop(~number, None)
        return list(live)

    def phase_of(self, place: int) -> tuple[int, int]:
        """(step, phase) in which an event fell."""
        index = bisect.bisect_right([first for _, _, first in self.marks], place) - 1
        return self.marks[max(index, 0)][:2] if self.marks else (0, 0)


@dataclasses.dataclass(frozen=True)
class Peak:
    """bytes, and the event at which they were reached."""

    bytes: int
    place: int


class MetaRecorder(TorchDispatchMode):
    """Records allocations and frees on devices of one kind ("cpu", "cuda")."""

    def __init__(self, device: str, workspaces: Workspaces | None = None):
        super().__init__()
        self.device, self.workspaces = device, workspaces
        self.trace = Trace([], array.array("q"), [])
        self.live: dict[int, int] = {}  # address of the storage → number of its block
        self.watches: dict[int, Any] = {}
        self.modules: list[str] = []
        self.numbered: list[tuple[int, str]] = []  # sequence numbers of autograd, with the module of the forward
        self.step, self.phase = 0, 0
        self.closed = False
        self.doubts: set[str] = set()
        sole_holder()  # measured now: inside of an op it could not be

    def mark(self, step: int, phase: str) -> None:
        """From here on it is this phase of this step."""
        self.step, self.phase = step, PHASES.index(phase)
        self.trace.marks.append((self.step, self.phase, len(self.trace.events)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked for in every op, so without a detour
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        if out is None or func is _DEVICE:
            return out
        if self.phase == 3 and func in REPLACED and not torch.is_grad_enabled() and self._in_place(func, args, out):
            return out
        outputs = (
            [out] if isinstance(out, torch.Tensor) else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        )
        if self.phase == 2:
            self._number()
        if func.namespace not in KNOWN:
            self.doubts.add(f"{func.namespace}::{func._schema.name.split('::')[-1]}")
        extras = list(self.workspaces(func, args, out, self)) if self.workspaces is not None else []
        for index, tensor in enumerate(outputs):
            for extra in [e for e in extras if e.after == index]:
                self._workspace(extra, func)
            extras = [e for e in extras if e.after != index]
            self.record(tensor, op=str(func))
        for extra in extras:
            self._workspace(extra, func)
        return out

    def record(self, tensor: torch.Tensor, op: str = "", category: str = "") -> int | None:
        """Note a tensor's memory. Returns the number of its block; None where it is on another device or has none."""
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self.live.get(key)
        if number is None and (size := storage.nbytes()) > 0:
            number = self._allocate(size, op, category)
            self._watch(storage, number)
        elif number is not None and category:
            self.trace.blocks[number].category = category
        return number

    def number_of(self, tensor: Any) -> int | None:
        """The block of a tensor that was seen."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None
        return self.live.get(tensor.untyped_storage()._cdata)

    def belongs(self, number: int | None, parameter: Any) -> None:
        """Put a gradient or a state to the module of its parameter."""
        if number is not None and (own := self.number_of(parameter)) is not None:
            self.trace.blocks[number].module = self.trace.blocks[own].module

    def _allocate(self, size: int, op: str, category: str = "") -> int:
        number = len(self.trace.blocks)
        if not category and self.phase == 3 and torch.is_grad_enabled():
            category = "activations"  # a checkpointed forward, computed again
        self.trace.blocks.append(PredictedBlock(size, self.step, self.phase, self.module(), op, category))
        self.trace.events.append(number)
        return number

    def _watch(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata
        self.live[key] = number
        self.watches[key] = weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        self.watches.pop(key, None)
        number = self.live.pop(key, None)
        if number is not None and not self.closed:
            self.trace.events.append(~number)

    def _workspace(self, extra: Extra, func: Any) -> None:
        number = self._allocate(extra.bytes, str(func), "other")
        if extra.kept:
            self.trace.blocks[number].module = "libraries"
        if not extra.kept:
            self.trace.events.append(~number)

    def module(self) -> str:
        """The module at work; in the backward that of the forward whose derivative is computed."""
        if self.modules:
            return self.modules[-1]
        if self.phase != 3 or not self.numbered:
            return ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        index = bisect.bisect_right(self.numbered, (node._sequence_nr(), "\uffff")) - 1
        return self.numbered[index][1] if index >= 0 else ""

    def _number(self) -> None:
        """Remember which module the next node of autograd belongs to."""
        here, now = self.modules[-1] if self.modules else "", torch._C._autograd._get_sequence_nr()
        if not self.numbered or self.numbered[-1][1] != here:
            self.numbered.append((now, here))

    def _in_place(self, func: Any, args: Any, out: torch.Tensor) -> bool:
        """Autograd works in place where nobody else holds what it changes: where two gradients meet, and where one is
        put into zeros. It does not do so for tensors of another class or under a mode, as here: then the result takes
        over the memory of what it replaces."""
        first = args[0]
        if first.layout != torch.strided or first.shape != out.shape:
            return False
        old, output = first.untyped_storage(), out.untyped_storage()
        if old._cdata not in self.live or old.nbytes() != output.nbytes():
            return False
        if func is _ADD:
            good = len(args) > 1 and isinstance(args[1], torch.Tensor) and holders(first) == sole_holder()
        else:
            good = "zeros" in self.trace.blocks[self.live[old._cdata]].op
        if good:
            self.watches.pop(old._cdata, None)
            self._watch(output, self.live.pop(old._cdata))
        return good


KNOWN = frozenset({"aten", "prim", "prims", "profiler", "inductor"})
_ATEN = torch.ops.aten
REPLACED = frozenset(
    {
        _ATEN.add.Tensor,
        _ATEN.index_put.default,
        _ATEN.scatter.src,
        _ATEN.scatter.value,
        _ATEN.index_add.default,
        _ATEN.scatter_add.default,
        _ATEN.masked_scatter.default,
    }
)
"""Ops of which autograd takes the form that works in place, where it can."""
_ADD, _DEVICE = torch.ops.aten.add.Tensor, torch.ops.prim.device.default


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor, and how many its memory."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


class _Counting(TorchDispatchMode):
    """Notes the holders of what is added to."""

    counted: tuple[int, int] = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _ADD and not torch.is_grad_enabled():
            self.counted = holders(args[0])
        return out


@functools.cache
def sole_holder() -> tuple[int, int]:
    """What `holders` says of a gradient that only autograd's own buffer holds: measured on a graph that is known to
    have such a one, as the count differs between versions of torch."""
    with unset_fake_temporarily(), FakeTensorMode(), _Counting() as counting, torch.enable_grad():
        leaf = torch.empty(2, requires_grad=True)
        (leaf.exp() + leaf.sin()).sum().backward()
    return counting.counted
