"""Watch training steps until one goes bad, and say what was seen.

A `Probe` attaches everything (op recorder, module stack, engine and optimizer watches), is told where steps begin and
end, and after each step gives a verdict: nothing, or a target (the loss, a gradient, a parameter that went bad and
mattered) with the births that lead to it. Detaching leaves nothing behind.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.backward import Backward, EngineWatch, OptimizerWatch
from nbdebug.observe.locations import Site, StackLines, at_site
from nbdebug.observe.modules import ModuleNames, ModuleStack
from nbdebug.observe.ops import Schema
from nbdebug.observe.recorder import Op, Recorder
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
    read_scalars,
    storage_key,
    tensors_in,
)
from nbdebug.report import Where
from nbdebug.tools.nan.facts import Target
from nbdebug.tools.nan.operands import OperandRecorder
from nbdebug.tools.nan.taint import TaintTracker


def unseen(method: Callable) -> Callable:
    """Our own look at tensors is no part of the step; and a fault in it must not stop the training."""

    @functools.wraps(method)
    def quiet(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.recorder.disabled_by:
            return None
        with _disable_current_modes(), torch.no_grad():
            try:
                return method(self, *args, **kwargs)
            except Exception as fault:  # the border
                self.recorder.disable(fault)
                return None

    return quiet


class CompiledCall(NamedTuple):
    """A compiled module as it was last called."""

    module: Any
    args: tuple
    kwargs: dict
    site: Site | None


def is_compiled(module: Any) -> bool:
    """Whether a module, or a part of it, runs compiled code (`torch.compile(model)` or `model.compile()`)."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in module.modules()
    )


class StopCell(BaseException):
    """Ends a watched cell after the step that went bad; no `except Exception` of the user's swallows it."""


@dataclasses.dataclass
class RunHistory:
    """The run so far, step by step, for the facts. losses: the roots of backward. parameter_growth: largest parameter
    now over its first size, small ones measured against a tenth of the largest. input_growth: the same for the model's
    inputs. first_step: the number of the step with which these two begin."""

    losses: list[float] = dataclasses.field(default_factory=list)
    parameter_growth: list[float] = dataclasses.field(default_factory=list)
    input_growth: list[float] = dataclasses.field(default_factory=list)
    optimizer: str = ""
    learning_rate: float | None = None
    optimizer_line: Where | None = None
    optimizer_steps: int = 0
    first_step: int = 0
    scaler_skips: list[int] = dataclasses.field(default_factory=list)
    guarded: list[int] = dataclasses.field(default_factory=list)
    _first_sizes: list[float] = dataclasses.field(default_factory=list)
    _first_input: float = 0.0
    _losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    _inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def begin_step(self, trained: list[torch.Tensor], one_by_one: bool) -> None:
        """Measure the parameters as a step finds them: each, or, where that costs, only the largest of all."""
        trained = [p for p in trained if p.layout is torch.strided and can_be_nonfinite(p)]
        sizes = (
            read_scalars([size for p in trained for size in largest([p])])
            if one_by_one
            else read_scalars(largest(trained))
        )
        self._first_sizes = self._first_sizes if len(self._first_sizes) == len(sizes) else sizes
        floor = 0.1 * max((s for s in self._first_sizes if math.isfinite(s)), default=0.0)
        growth = [
            now / max(first, floor) for now, first in zip(sizes, self._first_sizes, strict=True) if max(first, floor)
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
        self._first_input = self._first_input or size
        self.input_growth.append(size / self._first_input if self._first_input else 1.0)
        self._losses, self._inputs = [], []


def register(names: ModuleNames, recorder: Recorder) -> None:
    """Parameters and buffers, under their names; new ones are looked at."""
    for tensor, (role, name, module) in names.all_tensors():
        values = dense(tensor)
        if values is None or tensor.device.type == "meta":
            continue
        reach = PARAMETER if role == "parameter" else 0
        known = recorder.storages.get(storage_key(values))
        if known is not None:  # made under our eyes, or seen before the model was known
            known.role, known.name, known.module, known.reach = role, name, module, known.reach | reach
            continue
        memory = recorder.storages[storage_key(values)] = StorageInfo(
            values.untyped_storage(), None, reach, role, name, module
        )
        recorder.on_external(tensor, memory)


def mark_input(recorder: Recorder, flow: TaintTracker, tensor: torch.Tensor, site: Site | None) -> None:
    """A tensor that can be read is given to the model at `site`."""
    values = dense(tensor)
    assert values is not None, "it can be read"
    known = recorder.storages.get(storage_key(values))
    if known is None:
        known = recorder.storages[storage_key(values)] = StorageInfo(values.untyped_storage(), None, INPUT, "input")
        known.entered = site
        recorder.storage_info(tensor)
    if known.maker is None and known.role in ("target", "input"):
        known.role, known.entered = "input", known.entered or site
    if not known.reach & PARAMETER:
        known.reach |= INPUT
    for birth, mask in flow.masks(values).items():
        memory = flow.births[birth].memory
        if memory is not None and memory.role in ("target", "input"):  # rows of the batch, not of the data set
            memory.role, memory.entered = "input", memory.entered or site
            flow.births.enters(birth, mask)


@dataclasses.dataclass
class Detection:
    """Something bad that mattered: what, and the births that it comes from. position: how far the tape had come then;
    ref: the tape's name for the tensor, where it is neither a loss nor a gradient."""

    target: Target
    origins: set[int]
    position: int = 0
    ref: Ref | None = None

    def rename(self, name: str) -> None:
        """Say which of the tensors that were looked at together is the first bad one."""
        self.target = dataclasses.replace(self.target, name=name)


class Detections:
    """What was seen in one step, in order. live: whether the books are kept while the step runs."""

    def __init__(self, flow: TaintTracker, tape: Tape, live: bool):
        self.flow, self.tape, self.live = flow, tape, live
        self.step = 0
        self.clear()

    def clear(self) -> None:
        self.found: list[Detection] = []
        self._waiting: list[tuple[torch.Tensor, Detection]] = []

    def look(
        self,
        kind: str,
        tensors: Iterable[tuple[str, torch.Tensor]],
        place: StackLines | Where | None = None,
        born_only: bool = False,
    ) -> None:
        """Note whether any of these is bad. born_only: bad values that came in from outside do not count."""
        named = [(n, t) for n, t in tensors if (v := dense(t)) is not None and can_be_nonfinite(v)]
        if not named:
            return
        where = place if isinstance(place, Where) else at_site(Where(step=self.step), place)
        ref = self.tape.find(named[0][1]) if kind == "returned" else None
        made = Detection(Target(kind, where, named[0][0]), set(), len(self.tape.entries) - (kind != "loss"), ref)
        if not self.live:
            self._waiting += [(size, made) for size in largest([t for _, t in named])]
            return
        for name, tensor in named:
            born = {b for b in self.flow.origins(tensor) if not born_only or self.flow.births[b].memory is None}
            if born and not made.origins:
                made.rename(name)
                self.found.append(made)
            made.origins |= born
        if made.origins and not self.flow.settled:
            self.flow.settled = set(made.origins)

    def add(self, kind: str, origins: set[int], name: str = "") -> None:
        """Note something whose origins are known already."""
        if origins:
            self.found.append(
                Detection(Target(kind, Where(step=self.step), name), set(origins), len(self.tape.entries) - 1)
            )

    def settle(self) -> None:
        """Read what is still on the device: one wait for the whole step."""
        values = read_scalars([size for size, _ in self._waiting])
        for value, (_, seen) in zip(values, self._waiting, strict=True):
            if not math.isfinite(value) and seen not in self.found:
                self.found.append(seen)
        self._waiting.clear()


def finite_scalars(returned: Any) -> bool:
    """Whether the single numbers among what a step returned are finite."""
    if isinstance(returned, float):
        return math.isfinite(returned)
    return all(all_finite(t) for t in tensors_in(returned) if t.numel() == 1 and can_be_nonfinite(t))


class Probe:
    """See the module's docstring. models and optimizers: by the names that the user knows them by. live: keep the books
    while the step runs (else only record it: `relive.py` finds out afterwards). cell: find the steps' ends by the
    optimizers. named: the user named the models; else they were found, and one that is met in the run is taken too."""

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
        self.flow = TaintTracker(self.recorder, OperandRecorder(self.recorder))
        self.recorder.watchers = [self.flow, self.tape, self] if live else [self.tape, self]
        self.recorder.light = not live
        self.sightings = Detections(self.flow, self.tape, live)
        self.engine = EngineWatch(self._backward_began, self._backward_ended, without_modes=not live)
        self.optimizing = OptimizerWatch(self._optimizer_begins, self._optimizer_done)
        self.run, self.step = RunHistory(), 0
        self.about_to_step = False  # the step is run again without its optimizer, which was called
        self.spoiled_buffers: dict[str, Any] = {}  # the birth, for buffers that went bad in a step that was sound
        self.buffers_spoiled = False
        self.adopted = ""  # the type of a model that was met in the run
        self.proven = False  # a replay has failed as the step did
        self.caught: dict[int, Any] = {}  # what a replay saw ops be given, by their numbers
        self._steps_of: collections.Counter[int] = collections.Counter()
        self._skips = 0
        self._attached = False
        self._clear()

    # -- attaching ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        with contextlib.ExitStack() as undo:  # where one can't be attached, those before it leave
            for watch in (self.stack, self.engine, self.optimizing):
                undo.callback(watch.detach)
                watch.attach()
            self.recorder.__enter__()
            self._attached = True
            undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._attached:
            self._attached = False
            self.recorder.__exit__(None, None, None)
            self.optimizing.detach()
            self.engine.detach()
            self.stack.detach()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.sightings.clear()
        self.sightings.step = self.step
        self.backward_runs = self.engine_runs = 0
        self.unscaled = self.stepped = False
        self._backward_place: StackLines | None = None

    @unseen
    def begin_step(self, step: int) -> None:
        """To be called before each step; measures the parameters as the step finds them."""
        self.step = step
        if self.recorder.custom_backward and not self.live:
            self._look_live()
        self._clear()
        self.recorder.new_step(step)
        self.flow.begin_step()
        self.tape.reset()
        register(self.names, self.recorder)
        self.run.begin_step(self._trained(), one_by_one=self.live)

    def _look_live(self) -> None:
        """From the next step on, look while the step runs: a replay would not know all of its backward."""
        self.live = self.sightings.live = True
        self.recorder.light = self.engine.without_modes = False
        self.recorder.watchers.insert(0, self.flow)

    def _trained(self) -> list[torch.Tensor]:
        """All parameters that are known: those of models and optimizers, each once."""
        found = {id(p): p for m in self.names.models.values() for p in m.parameters()}
        found |= {id(p): p for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        return [p for p in found.values() if p.device.type != "meta" and not is_lazy(p)]

    @unseen
    def end_step(self, returned: Any = None, error: BaseException | None = None) -> Detection | None:
        """The verdict on the step: what went bad first that mattered, or None."""
        self.run.end_step()
        if self._scaler_skipped(returned):
            self.run.scaler_skips.append(self.step)
            self.sightings.clear()
            return None
        if not self.stepped and self.engine_runs and not (self.scaler and not self.unscaled):
            leaves = list({id(p): p for p in (*self._trained(), *self.tape.leaves.values())}.values())
            self._look_at_gradients(leaves)
            self.sightings.look("parameter", [(self._name(p), p) for p in leaves], born_only=True)  # updated by hand
        if not self.backward_runs and error is None:
            self._look_at_returned(returned)
        self._look_at_buffers()
        self.sightings.settle()
        if error is None and self._guarded(returned):
            self.run.guarded.append(self.step)
            self.sightings.clear()
        if not self.sightings.found and error is not None:
            self.sightings.add("exception", self.flow.last_read or self.flow.last_bad, type(error).__name__)
        return self.verdict

    @property
    def verdict(self) -> Detection | None:
        """What was seen first in the step that ended last."""
        return self.sightings.found[0] if self.sightings.found else None

    def _look_at_buffers(self) -> None:
        """Not live, a buffer that goes bad is noticed at the end of its step, while the step can still be replayed."""
        if self.live:
            return
        fresh = [
            (n, t)
            for t, (role, n, _) in self.names.all_tensors()
            if role == "buffer" and can_be_nonfinite(t) and n not in self.spoiled_buffers
        ]
        sizes = read_scalars([size for _, t in fresh for size in largest([t])])
        self.buffers_spoiled = any(math.isnan(size) for size in sizes)

    def _scaler_skipped(self, returned: Any) -> bool:
        """A GradScaler met inf gradients and did not step: normal, while the loss that the step returns is finite."""
        return self.unscaled and not self.stepped and finite_scalars(returned)

    def _guarded(self, returned: Any) -> bool:
        """The user's code looked at what was bad, and did not let the optimizer step: that is normal too."""
        if (
            self.stepped
            or self.about_to_step
            or not (self.optimizers or self.run.optimizer_steps)
            or not self.sightings.found
        ):
            return False
        return bool(self.sightings.found[0].origins & self.flow.checked) and finite_scalars(returned)

    def _look_at_gradients(self, parameters: Any) -> None:
        self.sightings.look(
            "gradient", [(self._name(p), p.grad) for p in parameters if p.grad is not None], self._backward_place
        )

    def _look_at_returned(self, returned: Any) -> None:
        candidates = tensors_in(returned)
        if isinstance(returned, Mapping) and isinstance(returned.get("loss"), torch.Tensor):
            candidates = [returned["loss"]]
        elif isinstance(getattr(returned, "loss", None), torch.Tensor):
            candidates = [returned.loss]
        for tensor in candidates:
            self.sightings.look("returned", [("", tensor)])
        if isinstance(returned, float) and not math.isfinite(returned):
            self.sightings.add("returned", self.flow.last_read)

    # -- what the watches tell ----------------------------------------------------------------------------------------

    def _external(self, tensor: torch.Tensor, memory: StorageInfo) -> None:
        if self.live:
            self.flow.external(tensor, memory)

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
            values = dense(tensor)
            if values is None or values.device.type == "meta":
                continue
            if self.flow.births.batch is None and tensor.dim():
                self.flow.births.batch = tensor.shape[0]
            self.flow.births.folds |= folds_of(tensor.shape)
            if can_be_nonfinite(values):
                self.run.note_input(values)
            mark_input(self.recorder, self.flow, tensor, site)
        self.recorder.model_called = True

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

    @unseen
    def _backward_began(self, call: Backward) -> None:
        again = self.recorder.called_from  # set in the replay of a remembered step
        self._backward_place = call.stack if again is None else StackLines(again, None, False, None)
        self.engine_runs += 1
        if not call.accumulate:
            return
        self.backward_runs += 1
        for root in call.roots:
            self.run.note_loss(root)
        self.sightings.look("loss", [("", root) for root in call.roots], self._backward_place)

    @unseen
    def _backward_ended(self, call: Backward, result: Any) -> None:
        self.tape.backward(call, result)
        self.flow.births.segment += call.accumulate

    @unseen
    def _optimizer_begins(self, optimizer: Any, place: StackLines) -> None:
        self.run.optimizer = type(optimizer).__name__
        self.run.learning_rate = float(optimizer.param_groups[0]["lr"])
        self.run.optimizer_line = at_site(Where(step=self.step, phase="optimizer"), place)
        self._look_at_gradients(p for group in optimizer.param_groups for p in group["params"])

    @unseen
    def _optimizer_done(self, optimizer: Any) -> None:
        self.stepped = True
        self.run.optimizer_steps += 1
        self._steps_of[id(optimizer)] += 1
        parameters = [(self._name(p), p) for group in optimizer.param_groups for p in group["params"]]
        self.sightings.look("parameter", parameters, self.run.optimizer_line, born_only=True)
        if self.cell:
            self.sightings.settle()
            if self.sightings.found:
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

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: Any) -> None:
        if schema.base == "amp_foreach_non_finite_check_and_unscale":
            self.unscaled = True
        elif schema.base == "amp_update_scale" and self.unscaled and not self.stepped:
            self._skips += 1
