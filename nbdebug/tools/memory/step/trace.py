"""A step under watch: each op, each module call, backward and the optimizers report to the allocation log.

Nothing is changed for it: the hooks are torch's global ones, and all of them leave with the watch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.interrupts import undone_by, uninterrupted
from nbdebug.observe.backward import Backward, EngineWatch, OptimizerWatch
from nbdebug.observe.locations import Site
from nbdebug.observe.modules import ModuleNames, ModuleStack
from nbdebug.observe.recorder import Recorder
from nbdebug.observe.tensors import tensors_in
from nbdebug.tools.memory.step.allocations import Allocation, AllocationLog, HostMeter, Meter

_next_number = torch._C._autograd._get_sequence_nr
ROWS = 10_000
"""A table with fewer rows than this is small beside what its state may save."""


class StepTrace:
    """Follows steps while entered. backwards: the events at which a backward began; calls: at which a model's call
    ended; variables: the user's, for models that are made while it runs; evaluated: calls of a model in eval mode that
    recorded a graph; iterations: (event, number of the next autograd node) at which an optimizer, or where none steps a
    model, was done; steps: of optimizers; rows: (parameter, rows with a gradient, rows) of the largest table."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        variables: Mapping[str, Any] | None = None,
    ):
        self.names, self.optimizers, self.variables = ModuleNames(models), dict(optimizers), variables or {}
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
        self.log.evaluating = False

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
            self.log.evaluating = (
                not module.training
                and torch.is_grad_enabled()
                and bool(next((p for p in module.parameters() if p.requires_grad), None) is not None)
            )
            self.evaluated += self.log.evaluating
            for tensor in tensors_in((args, kwargs)):
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
        self.log.evaluating = False

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
