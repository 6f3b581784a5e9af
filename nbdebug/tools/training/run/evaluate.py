"""The loss on fixed batches, in either mode, without the training noticing.

Flags, buffers, gradients and random numbers are as before afterwards. Whatever goes wrong here is ours: the look is
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

from nbdebug.tools.training.run.data import unnoticed

MOST = 8
"""Batches looked at for one checkup. Eight give a standard error of a third of the spread between batches."""


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
    """Fixed batches of one loader, and their losses when asked. fault: why the loss could not be computed."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None,
        batches: Sequence[Any],
        most: int | None = MOST,
    ):
        self.model, self.loss_fn, self.fault = model, loss_fn, ""
        self.batches = list(batches if most is None else batches[:most])

    def losses(self, training: bool = False) -> list[float]:
        """One loss a batch; empty where there is nothing to ask, or where asking failed."""
        try:
            return [] if self.fault else self.of(self.model, training)
        except Exception as fault:  # the border: it is our question that failed, not the user's loop
            self.fault = f"{type(fault).__name__}: {fault}"
            return []

    def of(self, model: nn.Module, training: bool = False) -> list[float]:
        """The same for another model in its place. Whatever asking raises passes."""
        if self.loss_fn is None or not self.batches:
            return []
        with unnoticed(self.loss_fn), torch.no_grad(), mode(model, training):
            return [loss_value(self.loss_fn(model, batch)) for batch in self.batches]

    def mean(self, training: bool = False) -> tuple[float, float] | None:
        """Mean loss and its standard error; None where there is none."""
        losses = self.losses(training)
        if not losses:
            return None
        return mean_and_error(losses)


def mean_and_error(losses: Sequence[float]) -> tuple[float, float]:
    mean = sum(losses) / len(losses)
    spread = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 and math.isfinite(mean) else 0.0
    return mean, spread


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
