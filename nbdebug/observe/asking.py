"""How a loss function wants to be called: with the model and a batch, or as a criterion with outputs and targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
