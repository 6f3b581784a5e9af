"""The course of a run: what is remembered from step to step, and how a watched cell is ended."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

from nbdebug.finding import Where
from nbdebug.observe.sites import Site


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
    return any(type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
               for m in module.modules())


class StopCell(BaseException):
    """Ends a watched cell after the step that went bad; no `except Exception` of the user's swallows it."""


@dataclasses.dataclass
class Run:
    """The run so far, step by step, for the facts."""

    losses: list[float] = dataclasses.field(default_factory=list)
    parameter_growth: list[float] = dataclasses.field(default_factory=list)
    input_growth: list[float] = dataclasses.field(default_factory=list)
    optimizer: str = ""
    learning_rate: float | None = None
    optimizer_line: Where | None = None
    optimizer_steps: int = 0
    scaler_skips: list[int] = dataclasses.field(default_factory=list)
    guarded: list[int] = dataclasses.field(default_factory=list)
