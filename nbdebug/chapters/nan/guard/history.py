"""The course of a guarded run, as far as the rules ask for it: losses, and how much the parameters have grown."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.nan.course import Run
from nbdebug.chapters.nan.guard.step import Step
from nbdebug.chapters.nan.places import at_site
from nbdebug.finding import Where
from nbdebug.observe.script import inputs_of
from nbdebug.observe.sites import Stop, locate
from nbdebug.observe.tensors import can_be_bad, dense, largest, read, tensors_in

_LOSSES = 200


class History:
    """Begun when the guard is: the parameters are measured then, and once more when a step is located."""

    def __init__(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]):
        self._begun = Run()
        parameters = {id(p): p for m in models.values() for p in m.parameters()}
        parameters |= {id(p): p for o in optimizers.values() for g in o.param_groups for p in g["params"]}
        usual: list[torch.Tensor] = [p for p in parameters.values() if p.device.type != "meta" and type(p) in _USUAL]
        self._begun.begin_step(usual, all(p.device.type == "cpu" for p in usual))
        self._first: float | None = None
        self._losses: collections.deque[float] = collections.deque(maxlen=_LOSSES)
        self._places: dict[int, Stop] = {}
        self._last: Any = None
        self._inputs: list[torch.Tensor] | None = None  # their largest magnitudes in the first step, not read

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps: remember from where, the first time."""
        self._last = optimizer
        if id(optimizer) not in self._places:
            self._places[id(optimizer)] = locate()._replace(frame=None)

    def add(self, step: Step) -> None:
        """A step is over."""
        if self._inputs is None:
            given = [v for t in tensors_in([i[1:] for i in inputs_of(step.tape)]) if (v := dense(t)) is not None]
            self._inputs = largest([v for v in given if can_be_bad(v) and v.device.type != "meta" and v.numel()])
        if step.loss is not None and step.outcome not in ("tripped", "skipped"):
            self._first = step.loss if self._first is None else self._first
            self._losses.append(step.loss)

    @property
    def ends(self) -> list[float]:
        """The first loss and the last, as far as they are known."""
        return [x for x in (self._first, *list(self._losses)[-1:]) if x is not None]

    def run(self, number: int) -> Run:
        """The run up to step `number`, as the tracer takes it; its growth is measured when the tracer begins."""
        run = Run(
            losses=[x for x in (self._first, *self._losses) if x is not None], first_step=number, optimizer_steps=number
        )
        run._first_sizes = list(self._begun._first_sizes)
        run._first_input = max((s for s in read(self._inputs or []) if math.isfinite(s)), default=0.0)
        if self._last is not None:
            run.optimizer = type(self._last).__name__
            lr = self._last.param_groups[0].get("lr")
            run.learning_rate = None if lr is None else float(lr)
            run.optimizer_line = at_site(Where(step=number, phase="optimizer"), self._places[id(self._last)])
        return run


_USUAL = (nn.Parameter, torch.Tensor)
