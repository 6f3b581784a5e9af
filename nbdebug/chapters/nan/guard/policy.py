"""What a guard is asked to do, checked where it is asked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

ON_TRIP = ("trace", "raise", "skip", "record")


@dataclasses.dataclass(frozen=True)
class Policy:
    """on_trip: one of ON_TRIP. max_grad_norm: gradients are clipped to this 2-norm. skip_above: a step whose norm is
    above this after clipping is dropped. keep: how many steps' numbers are kept at hand."""

    on_trip: str = "trace"
    max_grad_norm: float | None = None
    skip_above: float | None = None
    keep: int = 8

    def __post_init__(self) -> None:
        if self.on_trip not in ON_TRIP:
            raise ValueError(f"on_trip is one of {', '.join(ON_TRIP)}; got {self.on_trip!r}.")
        for name in ("max_grad_norm", "skip_above"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} is a norm, a number above 0; got {value!r}.")
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise ValueError(f"keep is a whole number of at least 1; got {self.keep!r}.")

    def clips(self, norm: float | None) -> bool:
        """Whether gradients of this norm are clipped."""
        return self.max_grad_norm is not None and norm is not None and norm > self.max_grad_norm

    def above(self, norm: float) -> bool:
        """Whether a step with this norm is dropped, clipped or not."""
        after = self.max_grad_norm if self.max_grad_norm is not None and self.clips(norm) else norm
        return self.skip_above is not None and after > self.skip_above

    @property
    def changes(self) -> bool:
        """Whether an update may be changed, or dropped while training goes on."""
        return self.max_grad_norm is not None or self.skip_above is not None or self.on_trip in ("skip", "record")

    @property
    def stops(self) -> bool:
        """Whether a bad step ends the run, or has to be looked at before it goes on."""
        return self.on_trip != "skip"


def models_of(given: Any) -> dict[str, nn.Module]:
    """The models by name; none where the step calls no module. Raises TypeError for what is no model."""
    if given is None or given == {}:
        return {}
    return _named(given, nn.Module, "model", "a torch.nn.Module")


def optimizers_of(given: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name. Raises TypeError for what is no optimizer."""
    return _named(given, torch.optim.Optimizer, "optimizer", "a torch.optim.Optimizer")


def check_scaler(scaler: Any) -> None:
    """Raises TypeError for what is no GradScaler."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler takes a torch.amp.GradScaler; got {_short(scaler)}.")


def _named(given: Any, kind: type, word: str, wanted: str) -> dict[str, Any]:
    if isinstance(given, kind):
        things = {word: given}
    elif isinstance(given, Mapping):
        things = {str(name): thing for name, thing in given.items()}
    elif isinstance(given, (list, tuple)):
        things = {f"{word} {i}": thing for i, thing in enumerate(given)}
    else:
        raise TypeError(f"{word} takes {wanted}, or a dict or list of them; got {_short(given)}.")
    for name, thing in things.items():
        if not isinstance(thing, kind):
            raise TypeError(f"{word} takes {wanted}, or a dict or list of them; {name!r} is {_short(thing)}.")
    if not things:
        raise ValueError(f"{word} takes {wanted}; got none.")
    return things


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"{type(value).__name__} {text[:60]}…"
