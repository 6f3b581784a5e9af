"""Labels that the trained model does not believe, and what the run is without them.

Only for classifiers whose output and labels can be read off: scores (N, K) and whole numbers (N). A sample is doubtful
when the model, at the end of the run and in eval mode, prefers another class than the one it was taught.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.run.checkup import mode
from nbdebug.chapters.training.run.order import rows_of
from nbdebug.chapters.training.run.sources import targets_of, unnoticed


@dataclasses.dataclass
class Doubts:
    """share: of the samples; batches: those of the pass without the doubtful samples (empty ones are left out);
    confusions: the commonest (label, preferred) pairs with their counts."""

    share: float
    batches: list[Any]
    confusions: list[tuple[tuple[int, int], int]]


def doubts(model: nn.Module, loss_fn: Callable[[Any, Any], Any], batches: Sequence[Any]) -> Doubts | None:
    """None where the output or the targets have another form. Raises what the loss raises."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, out: outputs.append(out))
    kept, doubtful, total = [], 0, 0
    pairs: dict[tuple[int, int], int] = {}
    try:
        with unnoticed(loss_fn), torch.no_grad(), mode(model, training=False):
            for batch in batches:
                outputs.clear()
                loss_fn(model, batch)
                found = _disagreeing(outputs[-1] if outputs else None, targets_of(batch))
                if found is None:
                    return None
                wrong, preferred, labels = found
                doubtful, total = doubtful + int(wrong.sum()), total + len(wrong)
                for a, b in zip(labels[wrong].tolist(), preferred[wrong].tolist()):
                    pairs[a, b] = pairs.get((a, b), 0) + 1
                rows = (~wrong).nonzero().flatten()
                if len(rows) > 1:
                    kept.append(rows_of(batch, rows))
    finally:
        handle.remove()
    return Doubts(doubtful / max(total, 1), kept, sorted(pairs.items(), key=lambda item: -item[1])[:5])


def _disagreeing(scores: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if not isinstance(scores, torch.Tensor) or not isinstance(labels, torch.Tensor) or scores.dim() != 2:
        return None
    if labels.dim() != 1 or labels.is_floating_point() or len(labels) != len(scores) or scores.shape[1] < 2:
        return None
    preferred = scores.argmax(1)
    return (preferred != labels.to(scores.device)) & (labels >= 0).to(scores.device), preferred, labels
