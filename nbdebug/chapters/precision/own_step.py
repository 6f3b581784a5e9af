"""A `loss_fn` that makes the whole step itself: zero_grad, backward, a GradScaler, an optimizer.

It is let run as it is, on a copy of the model, up to the place where the optimizer would step. Nothing of the user's
changes: a scaler scales by a number of ours and keeps its own, and nothing is updated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from nbdebug.observe.engine import Backward, EngineWatch, OptimizerWatch


class Reached(BaseException):
    """The place where the optimizer would step: it ends the call of `loss_fn`. No Exception, so that no `except` of
    the user's takes it for a fault."""


class OwnStep:
    """Around one call of `loss_fn`. loss: the sum of what its backwards began with, without the scale; backward:
    whether it has called backward itself; scaler: the GradScaler that it has used."""

    def __init__(self, scale: float = 1.0):
        self.scale, self.backward, self.scaler, self.loss = scale, False, None, 0.0
        self._engine = EngineWatch(self._began, self._ended)
        self._optimizers = OptimizerWatch(self._stepping, lambda optimizer: None)
        self._scaler_methods: dict[str, Any] = {}

    scaler: Any

    def __enter__(self) -> OwnStep:
        self._engine.attach()
        self._optimizers.attach()
        kind: Any = torch.amp.GradScaler
        ours: dict[str, Callable[..., Any]] = {
            "scale": self._scaled,
            "unscale_": lambda scaler, optimizer: self.unscaling(optimizer),
            "step": self._step_of,
            "update": lambda scaler, *new: None,
            "get_scale": lambda scaler: self.scale,
        }
        for name, method in ours.items():
            self._scaler_methods[name] = getattr(kind, name)
            setattr(kind, name, _of_enabled(self._scaler_methods[name], method))
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        for name, method in self._scaler_methods.items():
            setattr(torch.amp.GradScaler, name, method)
        self._optimizers.detach()
        self._engine.detach()
        return kind is Reached

    def _began(self, call: Backward) -> None:
        if call.accumulate:
            self.backward = True
            self.loss += sum(float(root.detach()) for root in call.roots if root.numel() == 1) / (
                1.0 if self.scaler is None else self.scale
            )

    def _ended(self, call: Backward, result: Any) -> None:
        if call.accumulate:
            self.backward_ended()

    def _scaled(self, scaler: Any, outputs: Any) -> Any:
        self.scaler = scaler
        return tree_map(lambda t: t * self.scale if isinstance(t, torch.Tensor) else t, outputs)

    def _step_of(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.unscaling(optimizer)
        self._stepping(optimizer, None)

    def _stepping(self, optimizer: Any, place: Any) -> None:
        self.stepping(optimizer)
        raise Reached

    def backward_ended(self) -> None:
        """A backward of the step has filled gradients."""

    def unscaling(self, optimizer: Any) -> None:
        """The scaler is to divide the gradients by its scale, explicitly or since it steps."""

    def stepping(self, optimizer: Any) -> None:
        """The optimizer is about to step."""


def _of_enabled(original: Callable, ours: Callable) -> Callable:
    """A scaler that is switched off stays as it is."""

    def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if scaler.is_enabled() else original)(scaler, *args, **kwargs)

    return method


@contextlib.contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Within, the user's model has no gradients: a step of its own could clear or use them. Then the same again."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
