"""The loss on fixed batches, in train or eval mode, without the training noticing; and which classes the model finds.

Flags, buffers, gradients and random numbers are as before afterwards. Whatever fails here is ours: the evaluation is
given up, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.tools.training.run.data import preserve_rng

MOST = 8
"""Batches of one evaluation. Eight give a standard error of a third of the spread between batches."""
CLASSES = 1000
"""More kinds of labels than this are no classes but words."""
LABEL_LOSSES = {
    "cross_entropy": 0.0,
    "nll_loss": 0.0,
    "binary_cross_entropy_with_logits": 0.0,
    "binary_cross_entropy": 0.5,
}
"""The losses of labels, and from which value on an output means yes, where there is one output for each label."""

LossFn = Callable[[Any, Any], Any]
"""loss_fn(model, batch)."""


def loss_root(loss: Any) -> Any:
    """What to call backward on: the loss itself, or the first of a tuple or the "loss" of a dict that it came in."""
    while isinstance(loss, (tuple, list, dict)) or hasattr(loss, "loss"):
        loss = loss[0] if isinstance(loss, (tuple, list)) else loss["loss"] if isinstance(loss, dict) else loss.loss
    return loss


def loss_value(loss: Any) -> float:
    """The loss as a number."""
    loss = loss_root(loss)
    return float(loss.detach().float().mean()) if isinstance(loss, torch.Tensor) else float(loss)


@contextlib.contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All modules in train or eval mode; buffers that a forward in train mode would move are put back as well."""
    flags = [(m, m.training) for m in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()] if training else []
    try:
        for module, _ in flags:
            module.training = training
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class FixedBatches:
    """Fixed batches of one loader, and their losses. error: why the loss could not be computed."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, batches: Sequence[Any], most: int | None = MOST):
        self.model, self.loss_fn, self.error = model, loss_fn, ""
        self.batches = list(batches if most is None else batches[:most])

    def losses(self, training: bool = False) -> list[float]:
        """One loss for each batch; none where there is no loss_fn or no batch, or where it failed."""
        try:
            return [] if self.error else self.losses_of(self.model, training)
        except Exception as error:  # the border: our evaluation failed, not the user's loop
            self.error = f"{type(error).__name__}: {error}"
            return []

    def losses_of(self, model: nn.Module, training: bool = False) -> list[float]:
        """The same for another model in its place. Whatever the loss raises passes."""
        if self.loss_fn is None or not self.batches:
            return []
        with preserve_rng(self.loss_fn), torch.no_grad(), mode(model, training):
            return [loss_value(self.loss_fn(model, batch)) for batch in self.batches]

    def mean(self) -> tuple[float, float] | None:
        """Mean loss in eval mode and its standard error; None where there is none."""
        losses = self.losses()
        return mean_and_error(losses) if losses else None


def mean_and_error(losses: Sequence[float]) -> tuple[float, float]:
    mean = sum(losses) / len(losses)
    spread = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 and math.isfinite(mean) else 0.0
    return mean, spread


class LossInputs(TorchFunctionMode):
    """Records the scores and targets of the losses of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor, str, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in LABEL_LOSSES:
            scores = args[0] if args else kwargs.get("input")
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(scores, torch.Tensor) and isinstance(target, torch.Tensor):
                self.calls.append((scores, target, name, kwargs.get("ignore_index", -100)))
        return func(*args, **kwargs)


def recalls(model: nn.Module, loss_fn: LossFn, batches: Sequence[Any]) -> Mapping[str, tuple[int, int]]:
    """class → (how many there are, how many are found); empty where the loss takes no labels."""
    counts: dict[str, tuple[int, int]] = {}
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, out: outputs.append(out))
    try:
        with preserve_rng(loss_fn), torch.no_grad(), mode(model, training=False):
            for batch in batches:
                outputs.clear()
                with LossInputs() as inputs:
                    loss_fn(model, batch)
                for scores, target, name, ignored in inputs.calls[:1]:
                    own = [o for o in outputs if isinstance(o, torch.Tensor) and o.shape == scores.shape]
                    _count(counts, [scores, *own], target, name, ignored)
    finally:
        handle.remove()
    return counts if len(counts) <= CLASSES else {}


def _count(
    counts: dict[str, tuple[int, int]], scores: Sequence[torch.Tensor], target: torch.Tensor, name: str, ignored: int
) -> None:
    """Add one batch. A label counts as found where any of these scores, the loss's or the model's, predicts it."""
    labels = target.detach()
    if name.startswith("binary"):
        if labels.dim() == 2 and labels.shape[1] > 1:
            return  # several tags of one sample
        if not bool(((labels == 0) | (labels == 1)).all()):
            return
        labels, predictions = labels.long(), [(s.detach() > LABEL_LOSSES[name]).long() for s in scores]
    else:
        if target.is_floating_point() or scores[0].dim() < 2:
            return
        predictions = [s.detach().argmax(1) for s in scores]
    right = torch.stack([p.reshape(labels.shape) == labels for p in predictions]).any(0)
    for label in labels.unique().tolist()[: CLASSES + 1]:
        if label == ignored:
            continue
        own = labels == label
        there, hits = counts.get(str(label), (0, 0))
        counts[str(label)] = there + int(own.sum()), hits + int(right[own].sum())
