"""What the user gave, made into `ask(model, batch) -> loss`, and batches of other sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

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
"""First parameters of a criterion; any other is a model."""
Ask = Callable[[Any, Any], torch.Tensor]


def asked(loss_fn: Callable[..., Any]) -> Ask:
    """How the loss of a batch is computed: loss_fn(model, batch), or loss_fn(outputs, targets) of a pair."""
    whole = not _criterion(loss_fn)

    def ask(model: Any, batch: Any) -> torch.Tensor:
        if whole:
            return root(loss_fn(model, batch))
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                "loss_fn(outputs, targets) needs a batch of the form (inputs, targets); write "
                f"loss_fn(model, batch) for a batch like this {type(batch).__name__}"
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        inputs, targets = (part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)
        return root(loss_fn(model(inputs), targets))

    return ask


def _criterion(loss_fn: Any) -> bool:
    if isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", "") in ("torch.nn.functional", "torch._C._nn"):
        return True
    try:
        names = [p.name.lower() for p in inspect.signature(loss_fn).parameters.values()]
    except (TypeError, ValueError):
        return False
    return bool(names) and (names[0] in OUTPUTS or names[0].startswith(("pred", "out", "logit")))


def root(value: Any) -> torch.Tensor:
    """The loss among what loss_fn returned: the tensor itself, or the first scalar that wants a gradient.

    Raises TypeError where there is none."""
    if isinstance(value, torch.Tensor):
        return value
    named = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", None)
    found = [t for t in (named, *tree_leaves(value)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not found:
        raise TypeError(
            "loss_fn has to return a tensor (or a tuple, dict or object that holds it); it returned "
            f"{type(value).__name__}"
        )
    return found[0]


def mapped(change: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """A batch with each tensor changed; shapes (torch.Size) count as float32 tensors. Containers of other classes that
    behave like a dict become dicts."""
    if isinstance(batch, torch.Size):
        return change(torch.empty(batch, device="meta"))
    if isinstance(batch, Mapping) and type(batch) is not dict:
        found = {key: mapped(change, value) for key, value in batch.items()}
        try:
            return type(batch)(found)  # type: ignore[call-arg]
        except Exception:  # a class of its own: what it holds is what counts
            return found
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch, **{f.name: mapped(change, getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        )
    return tree_map(
        lambda leaf: (
            change(leaf)
            if isinstance(leaf, torch.Tensor)
            else (mapped(change, leaf) if isinstance(leaf, (torch.Size, Mapping)) else leaf)
        ),
        batch,
        is_leaf=lambda leaf: isinstance(leaf, torch.Size) or (isinstance(leaf, Mapping) and type(leaf) is not dict),
    )


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(keep, batch)
    return found


def rows_of(batch: Any) -> int | None:
    """How many samples: the first dimension that all tensors (with at least one) share; None where they differ."""
    firsts = {t.shape[0] for t in tensors_of(batch) if t.dim()}
    return firsts.pop() if len(firsts) == 1 else None


def resized(batch: Any, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """A batch of the same form without data ("meta"), with each shape changed."""
    return mapped(lambda t: torch.empty(change(tuple(t.shape)), dtype=t.dtype, device="meta"), batch)
