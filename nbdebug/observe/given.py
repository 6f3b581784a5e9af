"""What a watch was given: models, optimizers, a scaler; checked where they are given, and by name from then on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


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


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"{type(value).__name__} {text[:60]}…"
