"""What a watch was given: models, optimizers, a scaler; checked where they are given, and by name from then on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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


MODEL_FORM, OUTPUT_FORM = "loss_fn(model, batch)", "loss_fn(outputs, targets)"
OUTPUTS = frozenset(
    {
        "output",
        "outputs",
        "out",
        "pred",
        "preds",
        "prediction",
        "predictions",
        "logits",
        "input",
        "y_hat",
        "y_pred",
        "yhat",
        "scores",
    }
)
"""Names of a first argument that is no model."""


def asked(loss_fn: Callable[..., Any], model: nn.Module, batch: Any) -> tuple[Callable[[Any, Any], Any], str]:
    """How loss_fn wants to be called: with (model, batch), or with (outputs, targets) of a pair. Returns a function of
    (model, batch), and which form was taken."""
    form = _form(loss_fn)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def of_outputs(model: Any, batch: Any) -> Any:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                "loss_fn(outputs, targets) needs batches of the form (inputs, targets); write "
                f"loss_fn(model, batch) for batches like this {type(batch).__name__}"
            )
        inputs, targets = (part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)
        return loss_fn(model(inputs), targets)

    return (loss_fn, form) if form == MODEL_FORM else (of_outputs, form)


def _form(loss_fn: Callable[..., Any]) -> str:
    if isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", "") in ("torch.nn.functional", "torch._C._nn"):
        return OUTPUT_FORM
    try:
        names = [p.name.lower() for p in inspect.signature(loss_fn).parameters.values()]
    except (TypeError, ValueError):
        return MODEL_FORM
    if names and (names[0] in OUTPUTS or names[0].startswith(("pred", "out", "logit"))):
        return OUTPUT_FORM
    return MODEL_FORM
