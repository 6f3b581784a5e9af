"""The course of a run: what is remembered from step to step, how a watched cell is ended, and how we look unseen."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.finding import Where
from nbdebug.observe.sites import Site
from nbdebug.observe.tensors import can_be_bad, dense, largest, read


def unseen(method: Callable) -> Callable:
    """Our own look at tensors is no part of the step; and a fault in it must not stop the training."""

    @functools.wraps(method)
    def quiet(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.recorder.blind:
            return None
        with _disable_current_modes(), torch.no_grad():
            try:
                return method(self, *args, **kwargs)
            except Exception as fault:  # the border
                self.recorder.go_blind(fault)
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
class Run:
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
        trained = [p for p in trained if p.layout is torch.strided and can_be_bad(p)]
        sizes = read([size for p in trained for size in largest([p])]) if one_by_one else read(largest(trained))
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
        if values is not None and can_be_bad(values) and values.numel() == 1:
            flat = values.detach().flatten()[0]
            self._losses.append(flat.abs() if flat.is_complex() else flat)

    def note_input(self, values: torch.Tensor) -> None:
        self._inputs.append(values.detach())

    def end_step(self) -> None:
        """Read what the step left: one wait for each device."""
        self.losses += read(self._losses)
        size = max((s for s in read(largest(self._inputs)) if math.isfinite(s)), default=0.0) if self._inputs else 0.0
        self._first_input = self._first_input or size
        self.input_growth.append(size / self._first_input if self._first_input else 1.0)
        self._losses, self._inputs = [], []
