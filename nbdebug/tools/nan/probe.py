"""Watch training steps until one goes bad: the loss, a gradient or a parameter is not finite, and it mattered.

A `Probe` attaches the op recorder, the module stack, and watches of autograd's engine and of optimizers. It is told
where steps begin and end. While a step runs it checks each loss when backward begins, the gradients before the
optimizer steps, and the parameters after that; what is bad becomes a `Detection`, with the origins that lead to it.
`end_step` gives the first one that mattered: a step that a GradScaler skips, or that the user's own code leaves out,
is healthy. The run's `RunHistory` goes along, for the rules. Detaching leaves nothing behind.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.interrupts import undone_by, uninterrupted
from nbdebug.observe.backward import Backward, EngineWatch, OptimizerWatch
from nbdebug.observe.locations import Site, StackLines, at_site
from nbdebug.observe.modules import ModuleNames, ModuleStack
from nbdebug.observe.ops import Schema
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.step_hooks import BatchHook
from nbdebug.observe.tape import Ref, Tape
from nbdebug.observe.tensors import (
    INPUT,
    PARAMETER,
    StorageInfo,
    all_finite,
    can_be_nonfinite,
    dense,
    folds_of,
    largest,
    loss_in,
    physical,
    read_scalars,
    storage_key,
    tensors_in,
)
from nbdebug.report import Where
from nbdebug.text import count
from nbdebug.tools.nan.facts import Target
from nbdebug.tools.nan.origins import Origin
from nbdebug.tools.nan.taint import TaintTracker


class StopCell(BaseException):
    """Ends a watched cell after the step that went bad; no `except Exception` of the user's swallows it."""


@dataclasses.dataclass
class Detection:
    """Something bad that mattered: what, and the origins that it comes from. position: how far the tape had come then;
    ref: the tape's name for the tensor, where it is neither a loss nor a gradient."""

    target: Target
    origins: set[int]
    position: int = 0
    ref: Ref | None = None

    def rename(self, name: str) -> None:
        """Say which of the tensors that were checked together is the first bad one."""
        self.target = dataclasses.replace(self.target, name=name)


class Detections:
    """What was detected in one step, in order. live: whether taint is tracked while the step runs."""

    def __init__(self, taint: TaintTracker, tape: Tape, live: bool):
        self.taint, self.tape, self.live = taint, tape, live
        self.step = 0
        self.clear()

    def clear(self) -> None:
        self._all: list[Detection] = []
        self._pending: list[tuple[torch.Tensor, Detection]] = []

    @property
    def first(self) -> Detection | None:
        return self._all[0] if self._all else None

    def check(
        self,
        kind: str,
        tensors: Iterable[tuple[str, torch.Tensor]],
        place: StackLines | Where | None = None,
        from_ops: bool = False,
    ) -> None:
        """Note whether any of these is bad. from_ops: bad values that came in from outside do not count."""
        named = [(n, t) for n, t in tensors if (v := dense(t)) is not None and can_be_nonfinite(v)]
        if not named:
            return
        where = place if isinstance(place, Where) else at_site(Where(step=self.step), place)
        ref = self.tape.find(named[0][1]) if kind == "returned" else None
        position = len(self.tape.entries) - (kind != "loss")
        detection = Detection(Target(kind, where, named[0][0]), set(), position, ref)
        if not self.live:
            self._pending += [(size, detection) for size in largest([t for _, t in named])]
            return
        for name, tensor in named:
            origins = self.taint.origins_of(tensor)
            if from_ops:
                origins = {origin for origin in origins if self.taint.origins[origin].storage is None}
            if origins and not detection.origins:
                detection.rename(name)
                self._all.append(detection)
            detection.origins |= origins
        if detection.origins and not self.taint.target_origins:
            self.taint.target_origins = set(detection.origins)

    def add(self, kind: str, origins: set[int], name: str = "") -> None:
        """Note something whose origins are known already."""
        if origins:
            target = Target(kind, Where(step=self.step), name)
            self._all.append(Detection(target, set(origins), len(self.tape.entries) - 1))

    def read_pending(self) -> None:
        """Read what is still on the device: one wait for the whole step."""
        values = read_scalars([size for size, _ in self._pending])
        for value, (_, detection) in zip(values, self._pending, strict=True):
            if not math.isfinite(value) and detection not in self._all:
                self._all.append(detection)
        self._pending.clear()


@dataclasses.dataclass
class RunHistory:
    """The run so far, step by step, for the facts. losses: the roots of backward. parameter_growth: largest parameter
    now over its first size, small ones measured against a tenth of the largest. input_growth: the same for the model's
    inputs. first_step: the number of the step with which these two begin. guarded: steps in which the user's own code
    kept the optimizer from stepping. optimizers: how many have stepped."""

    losses: list[float] = dataclasses.field(default_factory=list)
    parameter_growth: list[float] = dataclasses.field(default_factory=list)
    input_growth: list[float] = dataclasses.field(default_factory=list)
    optimizer: str = ""
    learning_rate: float | None = None
    nonfinite_settings: dict[str, float] = dataclasses.field(default_factory=dict)
    optimizer_line: Where | None = None
    optimizer_steps: int = 0
    optimizers: int = 1
    first_step: int = 0
    scaler_skips: list[int] = dataclasses.field(default_factory=list)
    guarded: list[int] = dataclasses.field(default_factory=list)
    first_sizes: list[float] = dataclasses.field(default_factory=list)
    first_input: float = 0.0
    _losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    _inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def begin_step(self, parameters: list[torch.Tensor], one_by_one: bool) -> None:
        """Measure the parameters as a step finds them: each, or, where that costs, only the largest of all."""
        parameters = [p for p in parameters if p.layout is torch.strided and can_be_nonfinite(p)]
        sizes = read_scalars([size for p in parameters for size in largest([p])] if one_by_one else largest(parameters))
        self.first_sizes = self.first_sizes if len(self.first_sizes) == len(sizes) else sizes
        floor = 0.1 * max((s for s in self.first_sizes if math.isfinite(s)), default=0.0)
        growth = [
            now / max(first, floor) for now, first in zip(sizes, self.first_sizes, strict=True) if max(first, floor)
        ]
        self.parameter_growth.append(max(growth, default=1.0))
        self._losses, self._inputs = [], []

    def note_loss(self, root: torch.Tensor) -> None:
        """Remember a loss of one number, without reading it yet."""
        values = dense(root)
        if values is not None and can_be_nonfinite(values) and values.numel() == 1:
            flat = values.detach().flatten()[0]
            self._losses.append(flat.abs() if flat.is_complex() else flat)

    def note_input(self, values: torch.Tensor) -> None:
        self._inputs.append(values.detach())

    def end_step(self) -> None:
        """Read what the step left: one wait for each device."""
        self.losses += read_scalars(self._losses)
        size = (
            max((s for s in read_scalars(largest(self._inputs)) if math.isfinite(s)), default=0.0)
            if self._inputs
            else 0.0
        )
        self.first_input = self.first_input or size
        self.input_growth.append(size / self.first_input if self.first_input else 1.0)
        self._losses, self._inputs = [], []


class CompiledCall(NamedTuple):
    """A compiled module as it was last called."""

    module: Any
    args: tuple
    kwargs: dict
    site: Site | None


def unseen(method: Callable) -> Callable:
    """Our own look at tensors is no part of the step; and a fault in it must not stop the training. A hook that another
    thread is about to call may come after the end: nothing is there then."""

    @functools.wraps(method)
    def quiet(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = vars(self).get("recorder")
        if recorder is None or recorder.disabled_by:
            return None
        with _disable_current_modes(), torch.no_grad():
            try:
                return method(self, *args, **kwargs)
            except Exception as fault:  # the error boundary
                recorder.disable(fault)
                return None

    return quiet


class Probe:
    """See the module's docstring. models and optimizers: by the names that the user knows them by. live: track taint
    while the step runs (else only record it: `locate.py` finds the origin afterwards). cell: find the steps' ends by
    the optimizers. named: the user named the models; else they were found, and one that the run calls is taken too."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        scaler: bool = False,
        cell: bool = False,
        live: bool = True,
        named: bool = True,
    ):
        self.names, self.named, self._called = ModuleNames(models), named, False
        self.optimizers, self.scaler, self.cell, self.live = dict(optimizers), scaler, cell, live
        self.compiled, self.compiled_calls = False, list[CompiledCall]()
        self.stack = ModuleStack(self.names, self._model_called)
        self.recorder = Recorder(self.stack, [], self._external)
        self.tape = Tape(self.recorder)
        self.taint = TaintTracker(self.recorder)
        self.recorder.watchers = [self.taint, self.tape, self] if live else [self.tape, self]
        self.recorder.light = not live
        self.detections = Detections(self.taint, self.tape, live)
        self.engine = EngineWatch(self._backward_began, self._backward_ended, without_modes=not live)
        self.engine.thread = here = threading.get_ident()  # a training in another thread is not this one
        self.optimizer_watch = OptimizerWatch(self._optimizer_begins, self._optimizer_done, here)
        self.batches = BatchHook(self._loading)
        self.inputs = list[tuple[int, Any]]()  # of each call of a model: (the next op, its inputs)
        self.given = list[
            tuple[int, tuple, Site | None]
        ]()  # the same for replays: the tensors as the tape refers to them
        self.latest_batch = True  # whether the step ran on the batch that was read last
        self.history, self.step = RunHistory(), 0
        self.without_optimizer = False  # the step is run again without its optimizer, which was called
        self.bad_buffers: dict[str, Origin] = {}  # buffers that went bad in a step that was otherwise sound
        self.buffer_went_bad = False
        self.trained = ""  # what shows that steps were made before the run
        self.adopted = ""  # the type of a model that nobody named and that the run called
        self.reproduced = False  # a replay has failed as the step did
        self.spilled = False  # for want of memory, a replay kept its activations in the host's
        self.reproductions: dict[int, Any] = {}  # what a replay saw ops be given, by their numbers
        self._steps_of: collections.Counter[int] = collections.Counter()
        self._skips = 0
        self._attached = False
        self._clear()

    # -- attaching ----------------------------------------------------------------------------------------------------

    @undone_by("__exit__")
    def __enter__(self) -> Probe:
        with contextlib.ExitStack() as undo:  # where one can't be attached, those before it leave
            for watch in (self.stack, self.engine, self.optimizer_watch, self.batches):
                undo.callback(watch.detach)
                watch.attach()
            self.recorder.__enter__()
            self._attached = True
            undo.pop_all()
        return self

    @uninterrupted
    def __exit__(self, *error: Any) -> None:
        if self._attached:
            self._attached = False
            self.recorder.__exit__(None, None, None)
            self.optimizer_watch.detach()
            self.engine.detach()
            self.stack.detach()
            self.batches.detach()

    def close(self) -> None:
        """Hold nothing any more. The parts refer to one another: what they hold would stay until Python looks for such
        cycles, and be found among the user's tensors."""
        self.recorder.paused, self.recorder.watchers, self.recorder.storages = True, [], {}
        for part in (self.taint, self.tape, self.detections, self):
            vars(part).clear()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.detections.clear()
        self.detections.step = self.step
        self.backward_runs = self.engine_runs = 0
        self.inputs.clear()
        self.given.clear()
        self.unscaled = self.stepped = False
        self._updating: torch.optim.Optimizer | None = None  # it has begun to step
        self._backward_place: StackLines | None = None

    @unseen
    def begin_step(self, step: int) -> None:
        """To be called before each step; measures the parameters as the step finds them."""
        self.step = step
        if not self.history.parameter_growth:
            self.trained = self.trained or _trained(self._parameters(), self.optimizers.values())
        if self.recorder.custom_backward and not self.live:
            self._go_live()
        self._clear()
        self.recorder.new_step(step)
        self.taint.begin_step()
        self.tape.reset()
        register(self.names, self.recorder)
        self.history.begin_step(self._parameters(), one_by_one=self.live)

    def _go_live(self) -> None:
        """From the next step on, track taint while the step runs: a replay would not know all of its backward."""
        self.live = self.detections.live = True
        self.recorder.light = self.engine.without_modes = False
        self.recorder.watchers.insert(0, self.taint)

    def _parameters(self) -> list[torch.Tensor]:
        """All parameters that are known: those of models and optimizers, each once."""
        parameters = {id(p): p for m in self.names.models.values() for p in m.parameters()}
        parameters |= {id(p): p for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        return [p for p in parameters.values() if p.device.type != "meta" and not is_lazy(p)]

    def end_step(self, returned: Any = None, error: BaseException | None = None) -> Detection | None:
        """What went bad first in the step that mattered, or None. Of a step that the probe could not watch to its end
        the losses are noted all the same."""
        detection: Detection | None = self._judge_step(returned, error)
        if self.recorder.disabled_by:
            with _disable_current_modes(), torch.no_grad():
                for tensor in () if self.backward_runs else tensors_in(returned):
                    self.history.note_loss(tensor)
                self.history.end_step()
        return detection

    @unseen
    def _judge_step(self, returned: Any, error: BaseException | None) -> Detection | None:
        known = len(self.history.losses)
        self.history.end_step()
        if self.unscaled and not self.stepped and finite_scalars(returned):  # a GradScaler found inf gradients: normal
            self.history.scaler_skips.append(self.step)
            self.history.losses[known:] = filter(math.isfinite, self.history.losses[known:])  # the scale made them so
            self.detections.clear()
            return None
        if not self.stepped and self.engine_runs and not (self.scaler and not self.unscaled):
            leaves = list({id(p): p for p in (*self._parameters(), *self.tape.leaves.values())}.values())
            self._check_gradients(leaves)
            self.detections.check("parameter", [(self._name(p), p) for p in leaves], from_ops=True)  # updated by hand
        if not self.backward_runs and error is None:
            self._check_returned(returned)
        self._check_buffers()
        self.detections.read_pending()
        if error is None and self._left_out(returned):
            self.history.guarded.append(self.step)
            self.detections.clear()
        if self.detections.first is None and error is not None:
            self.detections.add("exception", self.taint.last_read or self.taint.last_bad, type(error).__name__)
        return self.detections.first

    def _left_out(self, returned: Any) -> bool:
        """The user's code looked at what was bad, and did not let the optimizer step: that is normal too."""
        detection = self.detections.first
        if (
            self.stepped
            or self.without_optimizer
            or not (self.optimizers or self.history.optimizer_steps)
            or detection is None
        ):
            return False
        return bool(detection.origins & self.taint.checked) and finite_scalars(returned)

    def _check_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        gradients = [(self._name(p), p.grad) for p in parameters if p.grad is not None]
        self.detections.check("gradient", gradients, self._backward_place)

    def _check_returned(self, returned: Any) -> None:
        loss = loss_in(returned)
        for tensor in [loss] if isinstance(loss, torch.Tensor) else tensors_in(returned):
            self.detections.check("returned", [("", tensor)])
        if isinstance(returned, float) and not math.isfinite(returned):
            self.detections.add("returned", self.taint.last_read)

    def _check_buffers(self) -> None:
        """Not live, a buffer that goes bad is noticed at the end of its step, while the step can still be replayed."""
        if self.live:
            return
        buffers = [
            t
            for t, (role, name, _) in self.names.all_tensors()
            if role == "buffer" and can_be_nonfinite(t) and name not in self.bad_buffers
        ]
        self.buffer_went_bad = any(
            math.isnan(size) for size in read_scalars([s for t in buffers for s in largest([t])])
        )

    # -- what the watches report --------------------------------------------------------------------------------------

    def _external(self, tensor: torch.Tensor, storage: StorageInfo) -> None:
        if self.live:
            self.taint.external(tensor, storage)

    @unseen
    def _model_called(self, module: nn.Module, args: tuple, kwargs: dict, site: Site | None) -> None:
        """A model is given a batch: its size, and which tensors are its inputs."""
        self._maybe_next_step()
        site = site or self.recorder.called_from
        if self.names.of(module) is None and not self._adopt(module):
            return
        self._called = True
        if is_compiled(module):
            self.compiled, self.compiled_calls = True, [CompiledCall(module, args, kwargs, site)]
        for tensor in tensors_in((args, kwargs)):
            if (inner := physical(tensor)) is not tensor:  # inside torch.func, where no op of ours may run
                mark_input_storage(self.recorder, inner, site)
                continue
            values = dense(tensor)
            if values is None or values.device.type == "meta":
                continue
            if self.taint.origins.batch is None and tensor.dim():
                self.taint.origins.batch = tensor.shape[0]
            self.taint.origins.folds |= folds_of(tensor.shape)
            if can_be_nonfinite(values):
                self.history.note_input(values)
            mark_input(self.recorder, self.taint, tensor, site)
        if not self.live:
            given = tuple([self.tape.reference(t) for t in tensors_in((args, kwargs)) if physical(t) is t])
            self.given.append((self.recorder.count, given, site))
        if self.batches.log is not None:
            from nbdebug.observe.items import fingerprint  # here: only a step that reads a loader has items

            self.inputs.append((self.recorder.count, fingerprint((args, kwargs))))
        self.recorder.model_called = True

    def _loading(self, begins: bool) -> None:
        self.recorder.loading = begins

    def _adopt(self, module: nn.Module) -> bool:
        """A model that nobody named (built in the step or in the cell) is taken, unless another one has been called
        that is no part of it."""
        holds = any(part is known for known in self.names.models.values() for part in module.modules())
        if self.named or (self._called and not holds) or next(module.parameters(), None) is None:
            return not self.named and not self.names.models
        self.names.adopt(module)
        self.adopted = type(module).__name__
        register(self.names, self.recorder)
        return True

    def _maybe_next_step(self) -> None:
        """In a cell: once every optimizer that takes part has stepped, the next call of a model begins a new step."""
        if not self.cell:
            return
        done = min(self._steps_of.values(), default=0) + self._skips
        if done > self.step or (self.backward_runs and not self._steps_of and not self.optimizers):
            if self.end_step() is not None:
                raise StopCell
            self.begin_step(max(done, self.step + 1))

    def _backward_began(self, call: Backward) -> None:
        if call.accumulate and self.recorder.disabled_by:  # blind, but the loss is judged whatever happens
            self.backward_runs += 1
            for root in call.roots:
                self.history.note_loss(root)
        self._look_at_backward(call)

    @unseen
    def _look_at_backward(self, call: Backward) -> None:
        again = self.recorder.called_from  # set in the replay of a remembered step
        self._backward_place = call.stack if again is None else StackLines(again, None, False, None)
        self.engine_runs += 1
        if not call.accumulate:
            return
        self.backward_runs += 1
        for root in call.roots:
            self.history.note_loss(root)
        self.detections.check("loss", [("", root) for root in call.roots], self._backward_place)

    @unseen
    def _backward_ended(self, call: Backward, result: Any) -> None:
        self.tape.backward(call, result)
        self.taint.origins.segment += call.accumulate
        if self._updating is not None:  # in a closure: another backward may follow before the update
            self._check_gradients(p for group in self._updating.param_groups for p in group["params"])

    @unseen
    def _optimizer_begins(self, optimizer: Any, place: StackLines) -> None:
        self._updating = optimizer
        self.history.optimizer = type(optimizer).__name__
        self.history.learning_rate = float(optimizer.param_groups[0].get("lr", math.nan))
        self.history.nonfinite_settings = {
            name: value
            for group in optimizer.param_groups
            for name, value in group.items()
            if isinstance(value, float) and not math.isfinite(value) and name != "lr"
        }
        self.history.optimizer_line = at_site(Where(step=self.step, phase="optimizer"), place)
        self._check_gradients(p for group in optimizer.param_groups for p in group["params"])

    @unseen
    def _optimizer_done(self, optimizer: Any) -> None:
        self.stepped, self._updating = True, None
        self.history.optimizer_steps += 1
        self._steps_of[id(optimizer)] += 1
        self.history.optimizers = len(self._steps_of)
        parameters = [(self._name(p), p) for group in optimizer.param_groups for p in group["params"]]
        self.detections.check("parameter", parameters, self.history.optimizer_line, from_ops=True)
        if self.cell:
            self.recorder.ahead = min(self._steps_of.values()) + self._skips > self.step
            self.detections.read_pending()
            if self.detections.first is not None:
                self.end_step()
                raise StopCell
            if not self.recorder.model_called:
                self._maybe_next_step()

    def _name(self, parameter: torch.Tensor) -> str:
        known = self.names.owner(parameter)
        return known[1] if known else ""

    # -- a watcher of its own, for the gradient scaler's check --------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        return None

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, saved: Any) -> None:
        if schema.base == "amp_foreach_non_finite_check_and_unscale":
            self.unscaled = True
        elif schema.base == "amp_update_scale" and self.unscaled and not self.stepped:
            self._skips += 1


def _trained(parameters: list[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """What shows that a step has been made with these parameters before; "" where nothing does."""
    states = [state for o in optimizers for state in o.state.values() if isinstance(state, dict) and state]
    if states and float(states[0].get("step", 1)):  # Adagrad has a state from the start
        return f"the optimizer has a state for {count(len(states), 'parameter')}"
    gradients = sum(p.grad is not None for p in parameters)
    return f"{count(gradients, 'parameter')} had a gradient before the step" if gradients else ""


def register(names: ModuleNames, recorder: Recorder) -> None:
    """Make parameters and buffers known to the recorder, under their names; new ones are looked at."""
    for tensor, (role, name, module) in names.all_tensors():
        values = dense(tensor)
        if values is None or tensor.device.type == "meta":
            continue
        reach = PARAMETER if role == "parameter" else 0
        known = recorder.storages.get(storage_key(values))
        if known is not None:  # made under our eyes, or seen before the model was known
            known.role, known.name, known.module, known.reach = role, name, module, known.reach | reach
            continue
        storage = StorageInfo(values.untyped_storage(), None, reach, role, name, module)
        recorder.storages[storage_key(values)] = storage
        recorder.on_external(tensor, storage)


def mark_input_storage(recorder: Recorder, values: torch.Tensor, site: Site | None) -> None:
    """The memory of a tensor is given to the model at `site`."""
    known = recorder.storages.get(storage_key(values))
    if known is None:
        known = recorder.storages[storage_key(values)] = StorageInfo(values.untyped_storage(), None, INPUT, "input")
        known.entered = site
        recorder.storage_info(values)
    if known.maker is None and known.role in ("target", "input"):
        known.role, known.entered = "input", known.entered or site
    if not known.reach & PARAMETER:
        known.reach |= INPUT


def mark_input(recorder: Recorder, taint: TaintTracker, tensor: torch.Tensor, site: Site | None) -> None:
    """A tensor that can be read is given to the model at `site`."""
    values = dense(tensor)
    assert values is not None, "it can be read"
    mark_input_storage(recorder, values, site)
    for origin, mask in taint.masks(values).items():  # rows of the batch, not of the data set
        taint.origins.note_model_input(origin, mask, values, site)


def is_compiled(module: Any) -> bool:
    """Whether a module, or a part of it, runs compiled code (`torch.compile(model)` or `model.compile()`)."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in module.modules()
    )


def finite_scalars(returned: Any) -> bool:
    """Whether the single numbers among what a step returned are finite."""
    if isinstance(returned, float):
        return math.isfinite(returned)
    return all(all_finite(t) for t in tensors_in(returned) if t.numel() == 1 and can_be_nonfinite(t))
