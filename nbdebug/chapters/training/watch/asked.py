"""What a watch is asked to do, checked where it is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Pace:
    """In steps: every: between measurements of gradients; ratios_every: of updates; activations_every: of units (0:
    never); keep: how many steps are kept whole."""

    every: int = 1
    ratios_every: int = 10
    activations_every: int = 10
    keep: int = 1000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = {"every": 1, "keep": 10}.get(field.name, 0)
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field.name} is a whole number of steps, {least} or more; got {value!r}.")


def models_of(given: Any) -> dict[str, nn.Module]:
    """The models by name; none for None: the optimizers' parameters are watched. Raises TypeError for what is none."""
    if given is None or given == {}:
        return {}
    return _by_name(given, nn.Module, "model", "a torch.nn.Module")


def optimizers_of(given: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name. Raises TypeError for what is none, ValueError for none at all."""
    return _by_name(given, torch.optim.Optimizer, "optimizer", "a torch.optim.Optimizer")


def scaler_of(given: Any) -> Any:
    """Raises TypeError for what is no GradScaler."""
    if given is not None and not isinstance(given, torch.amp.GradScaler):
        raise TypeError(f"scaler takes a torch.amp.GradScaler; got {_short(given)}.")
    return given


def _by_name(given: Any, kind: type, word: str, wanted: str) -> dict[str, Any]:
    if isinstance(given, kind):
        return {word: given}
    if isinstance(given, Mapping):
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


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"{type(value).__name__} {text[:60]}…"
