"""The allocation log of a step: which op allocated each storage, and when nothing held it any longer.

Several tensors share one storage, so the storage is what is logged. A weak reference reports its end. Memory that is
older than the step, or comes from outside torch's ops (a loader's batch), is logged when it is first seen. `Meter` and
`HostMeter` are what the allocators themselves measure meanwhile.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nbdebug.observe.ops import Schema, argument_tensors
from nbdebug.observe.recorder import Op
from nbdebug.observe.tensors import dense, strided_parts

ROUNDED = 512
"""CUDA's allocator hands out blocks of a multiple of this many bytes."""


class Allocation:
    """One piece of memory. op: that made it (None: it came from outside); start, end: numbers of events, end None
    while it lives; step: in which it came, -1 for what was there before; role: one of CATEGORIES where it is certain;
    needs: an operand of the op wanted a gradient; evaluation: made below a model in eval mode; used: by an op."""

    __slots__ = (
        "device",
        "end",
        "evaluation",
        "key",
        "nbytes",
        "needs",
        "op",
        "role",
        "shape",
        "start",
        "step",
        "used",
    )

    def __init__(self, key: int, nbytes: int, device: str, start: int, step: int, op: Op | None):
        self.key, self.nbytes, self.device, self.start, self.step, self.op = key, nbytes, device, start, step, op
        self.end: int | None = None
        self.role = ""
        self.needs = self.evaluation = self.used = False
        self.shape: tuple[int, ...] = ()


class AllocationLog:
    """A watcher for `observe.recorder.Recorder`. live: bytes by device; course: (event, live bytes) by device,
    since the step began; peaks: the highest of it, (bytes, event)."""

    def __init__(self) -> None:
        self.known: dict[int, Allocation] = {}
        self.allocations: list[Allocation] = []
        self.live: dict[str, int] = {}
        self.course: dict[str, list[tuple[int, int]]] = {}
        self.peaks: dict[str, tuple[int, int]] = {}
        self.step, self.event, self.began = -1, 0, 0
        self.evaluating = False
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}

    # -- the lives of storages ----------------------------------------------------------------------------------------

    def take_stock(self, further: Iterable[torch.Tensor] = ()) -> None:
        """Book every tensor that is alive now, as something that was there before."""
        there = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        for tensor in [*there, *further]:
            self.enter(tensor)
        there.clear()

    def begin_step(self, step: int) -> None:
        self.step, self.began = step, self.event
        self.course = {device: [(self.event, live)] for device, live in self.live.items()}
        self.peaks = {device: (live, self.event) for device, live in self.live.items()}
        self.allocations = [b for b in self.allocations if b.end is None]

    def enter(self, tensor: torch.Tensor, op: Op | None = None) -> list[Allocation]:
        """The books' entries of a tensor's memory; made where there are none yet."""
        return [entry for storage in storages_of(tensor) if (entry := self._entry(storage, tensor, op)) is not None]

    def _entry(self, storage: Any, tensor: torch.Tensor, op: Op | None) -> Allocation | None:
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self.known.get(key)
        if entry is None:
            if not nbytes:
                return None
            entry = self._allocate(storage, key, nbytes, op)
            entry.shape = tuple(tensor.shape)
        elif self._rounded(entry.device, nbytes) != entry.nbytes:
            self._resized(entry, self._rounded(entry.device, nbytes))
        return entry

    def _rounded(self, device: str, nbytes: int) -> int:
        return -(-nbytes // ROUNDED) * ROUNDED if device.startswith("cuda") else nbytes

    def _allocate(self, storage: Any, key: int, nbytes: int, op: Op | None) -> Allocation:
        device = str(storage.device)
        self.event += 1
        entry = Allocation(key, self._rounded(device, nbytes), device, self.event, self.step, op)
        entry.evaluation = self.evaluating
        self.known[key] = entry
        self.allocations.append(entry)
        self._refs[key] = weakref.ref(storage, functools.partial(_on_free, weakref.ref(self), key))
        self._changed(device, entry.nbytes)
        return entry

    def _resized(self, entry: Allocation, nbytes: int) -> None:
        """A storage that grew or shrank, as sharded parameters do."""
        self.event += 1
        self._changed(entry.device, nbytes - entry.nbytes)
        entry.nbytes = nbytes

    def free(self, key: int) -> None:
        entry = self.known.pop(key, None)
        self._refs.pop(key, None)
        if entry is not None:
            self.event += 1
            entry.end = self.event
            self._changed(entry.device, -entry.nbytes)

    def _changed(self, device: str, by: int) -> None:
        live = self.live[device] = self.live.get(device, 0) + by
        self.course.setdefault(device, [(self.began, live - by)]).append((self.event, live))
        if live > self.peaks.get(device, (-1, 0))[0]:
            self.peaks[device] = (live, self.event)

    def close(self) -> None:
        """Let go of everything: no weak reference of ours stays on the user's memory."""
        self._refs.clear()
        self.known.clear()
        self.leaves.clear()

    def place(self, entry: Allocation) -> tuple[str, int]:
        """Device and address of memory that is alive."""
        ref = self._refs.get(entry.key)
        storage = ref() if ref is not None else None
        return entry.device, 0 if storage is None else storage.data_ptr()

    # -- what the recorder tells --------------------------------------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> bool:
        """Whether an operand wants a gradient; operands that were never seen are logged."""
        needs = False
        for tensor in argument_tensors(args, kwargs):
            if tensor.requires_grad:
                needs = True
                if tensor.is_leaf and id(tensor) not in self.leaves:
                    self.leaves[id(tensor)] = weakref.ref(tensor)
            for entry in self.enter(tensor):
                entry.used = True
        return needs

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, needs: bool) -> None:
        for tensor in argument_tensors(out if isinstance(out, (list, tuple)) else (out,), {}):
            for entry in self.enter(tensor, op):
                if entry.op is op:
                    entry.needs = needs

    # -- what it is for -----------------------------------------------------------------------------------------------

    def mark(self, tensor: torch.Tensor | None, role: str, certain: bool = True) -> None:
        """What a tensor's memory is for; what is certain is not overruled by what is likely."""
        for entry in self.enter(tensor) if tensor is not None else ():
            if certain or not entry.role:
                entry.role = role

    def survivors(self, step: int) -> list[Allocation]:
        """What came in a step, still lives, and is no part of a model or an optimizer."""
        return [
            b
            for b in self.allocations
            if b.step == step
            and b.end is None
            and b.role not in ("parameters", "gradients", "optimizer state", "buffers")
        ]


def _on_free(books: weakref.ref[AllocationLog], key: int, _: Any) -> None:
    log = books()
    if log is not None:
        log.free(key)


def storages_of(tensor: torch.Tensor) -> Iterator[Any]:
    """The storages behind a tensor: one, or those of a sparse or wrapping tensor's parts. None on "meta"."""
    try:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            if not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and tensor.device.type != "meta":
                yield tensor.untyped_storage()
            return
        for part in strided_parts(tensor):
            values = dense(part)
            if values is not None and values.device.type != "meta":
                yield values.untyped_storage()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):  # no memory of its own
        return


_PLAIN = (torch.Tensor, torch.nn.Parameter)


OPAQUE = frozenset({"mkldnn_rnn_layer", "scaled_dot_product_flash_attention_for_cpu", "embedding_bag"})
"""Ops that take memory for themselves on the CPU; found by comparing the profiler's events with the log for some
forty layers. Convolutions do where oneDNN does not compute them."""
_profiling: Any = torch.autograd


class Meter:
    """A watcher. measured: by device the true peak of the step, the event after the op in which it came, the op, and
    what of it no tensor held. base: what was allocated when the step began, by device. Forgets the allocator's own
    peak, as `torch.cuda.reset_peak_memory_stats` does. profiled: a profiler of the user's own was at work; opaque: an
    op was met that takes memory for itself on the CPU."""

    def __init__(self, log: AllocationLog):
        self.log = log
        self.measured: dict[str, tuple[int, int, Op | None, int]] = {}
        self.base: dict[str, int] = {}
        self.profiled = self.opaque = False
        self._devices: list[int] = []

    def begin_step(self) -> None:
        self.measured, self.base = {}, {}
        self._devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        for number in self._devices:
            torch.cuda.reset_peak_memory_stats(number)
            self.base[f"cuda:{number}"] = torch.cuda.memory_allocated(number)

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        return None

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, saved: Any) -> None:
        """Asked after the log has what the op allocated."""
        if self.log.step == 0:
            self.profiled = self.profiled or torch._C._autograd._profiler_enabled()
            self.opaque = self.opaque or _opaque(schema.base, out)
        if schema.view or (not self._devices and not torch.cuda.is_initialized()):
            return
        if not self._devices:
            self._devices = list(range(torch.cuda.device_count()))
        for number in self._devices:
            current = torch._C._cuda_memoryStats(number)["allocated_bytes"]["all"]
            name = f"cuda:{number}"
            if current["peak"] > self.measured.get(name, (0,))[0]:
                self.measured[name] = current["peak"], self.log.event, op, current["peak"] - current["current"]
                torch._C._cuda_resetPeakMemoryStats(number)


def _opaque(base: str, out: Any) -> bool:
    if base != "convolution" or not isinstance(out, torch.Tensor):
        return base in OPAQUE
    return out.device.type == "cpu" and (out.dtype is torch.float64 or not torch.backends.mkldnn.is_available())


class HostMeter:
    """The allocations of the CPU as the profiler is told of them, while it runs."""

    def __init__(self) -> None:
        self.runs = False

    def start(self) -> None:
        if self.runs or torch._C._autograd._profiler_enabled():
            return
        state = _profiling.ProfilerState.CPU
        _profiling._enable_profiler_legacy(
            _profiling.ProfilerConfig(state, False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
        )
        self.runs = True

    def mark(self) -> None:
        """A new step begins."""
        if self.runs:
            with torch.autograd.profiler.record_function(STEP):
                pass

    def stop(self) -> tuple[int, str]:
        """How far memory rose above where the last step began, and the op in which it did; (0, "") where not known."""
        if not self.runs:
            return 0, ""
        self.runs = False
        events: list[Any] = [event for thread in _profiling._disable_profiler_legacy() for event in thread]
        marks = [n for n, event in enumerate(events) if event.kind() == "push" and event.name() == STEP]
        live = highest = 0
        inside: list[str] = []
        place = ""
        for event in events[marks[-1] if len(marks) > 1 else len(events) :]:
            kind = event.kind()
            if kind == "push":
                inside.append(event.name())
            elif kind == "pop" and inside:
                inside.pop()
            elif kind == "memory_alloc":
                live += event.cpu_memory_usage()
                if live > highest:
                    highest, place = live, inside[-1] if inside else ""
        return highest, place


STEP = "nbdebug: a step"
