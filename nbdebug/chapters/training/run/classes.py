"""How many samples (or pixels) of each class the trained model finds, on the fixed batches.

What the loss is given tells it: scores and labels of `cross_entropy` and its kin, whatever the form of the model or of
its batches. Where the scores that the loss gets are not those that the model returns (log-priors are added, say), the
model's own count too: a class is found if either finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.chapters.training.run.checkup import mode
from nbdebug.chapters.training.run.sources import unnoticed

LOSSES = {"cross_entropy": 0.0, "nll_loss": 0.0, "binary_cross_entropy_with_logits": 0.0, "binary_cross_entropy": 0.5}
"""The losses of labels, and from which value on an output says yes, where there is one output for each label."""
CLASSES = 1000
"""More kinds of labels than this are no classes but words."""


class _Heard(TorchFunctionMode):
    """Notes what the losses are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor, str, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in LOSSES:
            scores = args[0] if args else kwargs.get("input")
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(scores, torch.Tensor) and isinstance(target, torch.Tensor):
                self.calls.append((scores, target, name, kwargs.get("ignore_index", -100)))
        return func(*args, **kwargs)


def recalls(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batches: Sequence[Any]
) -> Mapping[str, tuple[int, int]]:
    """class → (how many there are, how many are found); empty where the loss is given no labels."""
    counts: dict[str, tuple[int, int]] = {}
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, out: outputs.append(out))
    try:
        with unnoticed(loss_fn), torch.no_grad(), mode(model, training=False):
            for batch in batches:
                outputs.clear()
                heard = _Heard()
                with heard:
                    loss_fn(model, batch)
                for scores, target, name, ignored in heard.calls[:1]:
                    own = [o for o in outputs if isinstance(o, torch.Tensor) and o.shape == scores.shape]
                    _count(counts, [scores, *own], target, name, ignored)
    finally:
        handle.remove()
    return counts if len(counts) <= CLASSES else {}


def _count(
    counts: dict[str, tuple[int, int]], given: Sequence[torch.Tensor], target: torch.Tensor, name: str, ignored: int
) -> None:
    if name.startswith("binary"):
        labels = target.detach()
        if labels.dim() > 1 and labels.shape[1] > 1 and labels.dim() == 2:
            return  # several tags of one sample
        if not bool(((labels == 0) | (labels == 1)).all()):
            return
        labels, said = labels.long(), [(s.detach() > LOSSES[name]).long() for s in given]
    else:
        if target.is_floating_point() or given[0].dim() < 2:
            return
        labels, said = target.detach(), [s.detach().argmax(1) for s in given]
    right = torch.stack([s.reshape(labels.shape) == labels for s in said]).any(0)
    for label in labels.unique().tolist()[: CLASSES + 1]:
        if label == ignored:
            continue
        own = labels == label
        there, found = counts.get(str(label), (0, 0))
        counts[str(label)] = there + int(own.sum()), found + int(right[own].sum())
