"""Watch training steps until one goes bad, and say what was seen.

A `Probe` attaches everything (op recorder, module stack, engine and optimizer watches), is told where steps begin and
end, and after each step gives a verdict: nothing, or a target (the loss, a gradient, a parameter that went bad and
mattered) with the births that lead to it. Detaching leaves nothing behind.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nbdebug.chapters.nan.course import CompiledCall, Run, StopCell, is_compiled, unseen
from nbdebug.chapters.nan.entrance import mark_input, register
from nbdebug.chapters.nan.flow import Flow
from nbdebug.chapters.nan.places import at_site
from nbdebug.chapters.nan.scene import SceneTaker
from nbdebug.chapters.nan.sightings import Seen, Sightings, finite_scalars
from nbdebug.finding import Where
from nbdebug.observe.engine import Backward, EngineWatch, OptimizerWatch
from nbdebug.observe.modules import ModuleNames, ModuleStack
from nbdebug.observe.record import Op, Recorder
from nbdebug.observe.schema import Schema
from nbdebug.observe.sites import Site, Stop
from nbdebug.observe.tape import Tape
from nbdebug.observe.tensors import (
    Memory,
    can_be_bad,
    dense,
    folds_of,
    largest,
    read,
    tensors_in,
)


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
        self.flow = Flow(self.recorder, SceneTaker(self.recorder))
        self.recorder.watchers = [self.flow, self.tape, self] if live else [self.tape, self]
        self.recorder.light = not live
        self.sightings = Sightings(self.flow, self.tape, live)
        self.engine = EngineWatch(self._backward_began, self._backward_ended, unseen=not live)
        self.optimizing = OptimizerWatch(self._optimizer_begins, self._optimizer_done)
        self.run, self.step = Run(), 0
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
        self._backward_place: Stop | None = None

    @unseen
    def begin_step(self, step: int) -> None:
        """To be called before each step; measures the parameters as the step finds them."""
        self.step = step
        if self.recorder.hidden and not self.live:
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
        self.recorder.light = self.engine.unseen = False
        self.recorder.watchers.insert(0, self.flow)

    def _trained(self) -> list[torch.Tensor]:
        """All parameters that are known: those of models and optimizers, each once."""
        found = {id(p): p for m in self.names.models.values() for p in m.parameters()}
        found |= {id(p): p for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        return [p for p in found.values() if p.device.type != "meta" and not is_lazy(p)]

    @unseen
    def end_step(self, returned: Any = None, error: BaseException | None = None) -> Seen | None:
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
    def verdict(self) -> Seen | None:
        """What was seen first in the step that ended last."""
        return self.sightings.found[0] if self.sightings.found else None

    def _look_at_buffers(self) -> None:
        """Not live, a buffer that goes bad is noticed at the end of its step, while the step can still be replayed."""
        if self.live:
            return
        fresh = [
            (n, t)
            for t, (role, n, _) in self.names.all_tensors()
            if role == "buffer" and can_be_bad(t) and n not in self.spoiled_buffers
        ]
        sizes = read([size for _, t in fresh for size in largest([t])])
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

    def _external(self, tensor: torch.Tensor, memory: Memory) -> None:
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
            if can_be_bad(values):
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
        self._backward_place = call.place if again is None else Stop(again, None, False, None)
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
    def _optimizer_begins(self, optimizer: Any, place: Stop) -> None:
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
