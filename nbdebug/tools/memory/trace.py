"""A step under watch: each op, each module call, backward and the optimizers report to the allocation log: which op
allocated each storage, and when nothing held it any longer.

Several tensors share one storage, so the storage is what is logged. A weak reference reports its end. Memory that is
older than the step, or comes from outside torch's ops (a loader's batch), is logged when it is first seen. `Meter` and
`HostMeter` are what the allocators themselves measure meanwhile. Nothing is changed for it: the hooks are torch's
global ones, and all of them leave with the watch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.interrupts import undone_by, uninterrupted
from nbdebug.observe.backward import Backward, EngineWatch, OptimizerWatch
from nbdebug.observe.locations import Site
from nbdebug.observe.modules import ModuleNames, ModuleStack
from nbdebug.observe.ops import Schema, argument_tensors
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import dense, strided_parts, tensors_in

ROUNDED = 512
"""CUDA's allocator hands out blocks of a multiple of this many bytes."""


class Allocation:
    """One piece of memory. op: that made it (None: it came from outside); start, end: numbers of events, end None
    while it lives; step: in which it came, -1 for what was there before; role: one of CATEGORIES where it is certain;
    needs: an operand of the op wanted a gradient; evaluation: made below a model in eval mode, by its id; used: by an
    op."""

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
        self.needs = self.used = False
        self.evaluation = 0
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
        self.evaluating = 0
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
            entry.shape = () if tensor.is_nested else tuple(tensor.shape)  # which a nested one does not have
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


_next_number = torch._C._autograd._get_sequence_nr
ROWS = 10_000
"""A table with fewer rows than this is small beside what its state may save."""


class StepTrace:
    """Follows steps while entered. given: the optimizers that were there; backwards: the events at which a backward
    began; calls: at which a model's call ended; variables: the user's, for models that are made while it runs;
    evaluated: calls of a model in eval mode that recorded a graph; evaluated_at: the line of the last of them; apart:
    of these models those of which no input asked for a gradient, each with the line of its last call;
    iterations: (event, number of the next autograd node) at which an optimizer, or where none steps a model, was done;
    steps: of optimizers; rows: (parameter, rows with a gradient, rows) of the largest table."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        variables: Mapping[str, Any] | None = None,
    ):
        self.names, self.optimizers, self.variables = ModuleNames(models), dict(optimizers), variables or {}
        self.given = list(self.optimizers.values())
        self.stack = ModuleStack(self.names, self._called)
        self.log = AllocationLog()
        self.meter, self.host, self.host_peak = Meter(self.log), HostMeter(), (0, "")
        self.recorder = Recorder(self.stack, [self.log, self.meter], lambda tensor, memory: None)
        self.recorder.light = self.recorder.numbered = True
        self.engine = EngineWatch(self._backward_began, self._backward_ended)
        self.optimizing = OptimizerWatch(self._optimizer_begins, self._optimizer_done)
        self.state: dict[str, int] = {}
        self.rows: tuple[str, int, int] | None = None
        self._undo = contextlib.ExitStack()
        self._clear()

    def _clear(self) -> None:
        self.backwards: list[int] = []
        self.calls: list[int] = []
        self.phases: dict[str, int] = {}
        self.iterations: list[tuple[int, int]] = []
        self.evaluated = self.steps = 0
        self.evaluated_at: Site | None = None
        self.apart: dict[int, tuple[nn.Module, Site | None]] = {}
        self.log.evaluating = 0

    # -- attaching ----------------------------------------------------------------------------------------------------

    @undone_by("__exit__")
    def __enter__(self) -> StepTrace:
        self.log.take_stock(self._grads())
        with self._undo:  # where one can't be attached, those before it leave
            for watch in (self.stack, self.engine, self.optimizing):
                self._undo.callback(watch.detach)
                watch.attach()
            self._undo.callback(torch_module.register_module_forward_hook(self._returned, always_call=True).remove)
            self._undo.enter_context(self.recorder)
            self._undo = self._undo.pop_all()
        return self

    @uninterrupted
    def __exit__(self, *error: Any) -> None:
        self.host.stop()
        self._undo.close()
        self.log.close()

    def begin_step(self, step: int) -> None:
        with _disable_current_modes():
            self._clear()
            self.recorder.new_step(step)
            self._mark_models()
            self.log.begin_step(step)
            self.meter.begin_step()
            self.host_peak = (0, "")
            if step == 1 and self.meter.opaque and not self.meter.profiled:
                self.host.start()
            self.host.mark()

    def end_step(self, last: bool = False) -> None:
        """Settle what is for what: gradients and state that the step left. last: no step follows that is measured."""
        with _disable_current_modes():
            if last:
                self.host_peak = self.host.stop()
            self._mark_models()

    # -- what is for what ---------------------------------------------------------------------------------------------

    def parameters(self) -> list[torch.Tensor]:
        """Of the models, of the optimizers, and whatever leaf wanted a gradient; each once."""
        tensors: dict[int, torch.Tensor] = {id(p): p for m in self.names.models.values() for p in m.parameters()}
        tensors |= {id(p): p for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        tensors |= {id(p): p for ref in list(self.log.leaves.values()) if (p := ref()) is not None and p.requires_grad}
        return list(tensors.values())

    def _grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def _mark_models(self) -> None:
        for parameter in self.parameters():
            self.log.mark(parameter, "parameters")
            self.log.mark(parameter.grad, "gradients")
        for model in self.names.models.values():
            for buffer in model.buffers():
                self.log.mark(buffer, "buffers")
        for optimizer in self.optimizers.values():
            self._mark_state(optimizer)

    def _mark_state(self, optimizer: Any) -> None:
        for parameter, values in optimizer.state.items():
            tensors = tensors_in(list(values.values()) if isinstance(values, Mapping) else values)
            for tensor in tensors:
                self.log.mark(tensor, "optimizer state")
            if isinstance(parameter, torch.Tensor):
                self.state[self._name(parameter)] = sum(
                    entry.nbytes for tensor in tensors for entry in self.log.enter(tensor)
                )

    def untrained(self) -> tuple[int, str, Site | None]:
        """A model of `apart` that no optimizer has a parameter of, where one has made a step: its id, name and line."""
        held = {id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        for key, (module, site) in self.apart.items() if self.steps else ():
            if not any(id(p) in held for p in module.parameters()):
                return key, self.names.of(module) or self._variable(module) or type(module).__name__, site
        return 0, "", None

    def backwards_after(self, allocation: Allocation) -> bool:
        return bool(self.backwards) and self.backwards[-1] > allocation.start

    def needed_until(self, allocation: Allocation) -> int:
        """The event until which memory lives at least if a backward needs it: that backward's begin, or else the end
        of the model's call."""
        ends = self.backwards if self.backwards_after(allocation) else self.calls
        return next((at for at in ends if at >= allocation.start), allocation.start)

    def _name(self, parameter: torch.Tensor) -> str:
        known = self.names.owner(parameter)
        return known[1] if known else f"a parameter of shape {tuple(parameter.shape)}"

    # -- what the watches tell ----------------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: tuple, kwargs: dict, site: Site | None) -> None:
        """A model is called from outside of any: what it is given are inputs."""
        self.phases.setdefault("forward", self.log.event)
        if self.names.of(module) is None and next(module.parameters(), None) is not None:
            self._meet(module)
        with _disable_current_modes():
            records = not module.training and torch.is_grad_enabled()
            records = records and any(p.requires_grad for p in module.parameters())
            self.log.evaluating = id(module) if records else 0
            self.evaluated += records
            self.evaluated_at = site if self.log.evaluating else self.evaluated_at
            given = tensors_in((args, kwargs))
            if self.log.evaluating and not any(tensor.requires_grad for tensor in given):
                self.apart[id(module)] = module, site
            for tensor in given:
                for entry in self.log.enter(tensor):
                    if not entry.role and not entry.needs:
                        entry.role = "inputs"

    def _meet(self, module: nn.Module) -> None:
        """A model that was made in the run: by its variable's name, or as "model" where it is the only one."""
        name = self._variable(module)
        if not self.names.models:
            self.names.adopt(module)
            self.names.models = {name or "model": module}
        elif name:
            self.names.models[name] = module
            self.names._add(name, module)

    def _variable(self, thing: Any) -> str:
        return next((n for n, v in list(self.variables.items()) if v is thing and not n.startswith("_")), "")

    def _returned(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Comes after the stack's own hook: outside of any module now, a model's call has ended."""
        if not self.stack.inside:
            self.calls.append(self.log.event)
            if not self.steps:
                self.iterations.append((self.log.event, _next_number()))

    def _backward_began(self, call: Backward) -> None:
        self.phases.setdefault("backward", self.log.event)
        self.backwards.append(self.log.event)
        self.log.evaluating = 0

    def _backward_ended(self, call: Backward, result: Any) -> None:
        with _disable_current_modes():
            for gradient in self._grads() if call.accumulate else ():
                self.log.mark(gradient, "gradients")

    def _optimizer_begins(self, optimizer: Any, place: Any) -> None:
        self.phases.setdefault("optimizer", self.log.event)
        if all(known is not optimizer for known in self.optimizers.values()):
            self.optimizers[self._variable(optimizer) or f"optimizer {len(self.optimizers)}"] = optimizer
        with _disable_current_modes():
            self._look_at_rows(optimizer)

    def _optimizer_done(self, optimizer: Any) -> None:
        self.iterations = [] if not self.steps else self.iterations
        self.iterations.append((self.log.event, _next_number()))
        self.steps += 1
        with _disable_current_modes():
            self._mark_state(optimizer)

    def _look_at_rows(self, optimizer: Any) -> None:
        """How many rows of the largest table the step has touched: state for all of them may be waste."""
        tables = [
            p
            for g in optimizer.param_groups
            for p in g["params"]
            if p.dim() == 2 and len(p) >= ROWS and p.grad is not None and p.grad.layout is torch.strided
        ]
        if tables and self.rows is None:
            table = max(tables, key=lambda p: p.numel())
            self.rows = self._name(table), int((table.grad != 0).any(1).sum()), len(table)
