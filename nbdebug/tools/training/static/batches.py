"""The batches of both loaders, and which of their tensors are inputs and which are targets."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, SequentialSampler

from nbdebug.observe.tensors import output_tensors
from nbdebug.tools.training.facts import Labels, LossCall, Overlap, Shift
from nbdebug.tools.training.run.data import batches_of, unnoticed
from nbdebug.tools.training.run.evaluate import loss_value
from nbdebug.tools.training.static import signals as inputs
from nbdebug.tools.training.static.batch_mixing import quiet
from nbdebug.tools.training.static.one_step import StepGraph

CLASSES = 1000
"""More kinds of labels than this are no classes but numbers of things."""


def classes_of(target: torch.Tensor, loss: LossCall | None) -> torch.Tensor | None:
    """Labels as a row of whole numbers, where there is one for each sample; None for tokens, pixels and quantities."""
    if target.dim() == 2 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.dim() != 1:
        return None
    if not target.is_floating_point():
        return target if loss is not None and loss.op in ("cross_entropy", "nll_loss") else None
    binary = loss is not None and loss.op.startswith("binary") and bool(((target == 0) | (target == 1)).all())
    return target.long() if binary else None


def labels(batches: Sequence[torch.Tensor], loss: LossCall | None, loader: Any) -> Labels | None:
    """Counts and order; None where the targets are no labels of samples."""
    rows = [classes_of(t, loss) for t in batches]
    known = [row.tolist() for row in rows if row is not None]
    if not known or len(known) != len(rows):
        return None
    flat = [label for row in known for label in row]
    counts = Counter(flat)
    if not 0 < len(counts) <= CLASSES:
        return None
    total = len(flat)
    runs = 1 + sum(a != b for a, b in itertools.pairwise(flat))
    expected = 1 + (total - 1) * (1 - sum((c / total) ** 2 for c in counts.values()))
    per_batch = statistics.median(len(set(row)) for row in known)
    return Labels(
        {str(k): v for k, v in sorted(counts.items())},
        total,
        runs,
        expected,
        per_batch,
        len(known),
        complete(loader, len(known)),
        isinstance(getattr(loader, "sampler", None), SequentialSampler),
    )


def complete(loader: Any, read: int) -> bool:
    """Whether that many batches are the whole pass."""
    try:
        return read >= len(loader)
    except TypeError:  # an iterable dataset has no length
        return False


ENDS = 32
"""Samples at either end of a dataset that tell whether it drifts."""
MOST, SECONDS = 400, 5.0
"""Batches of a loader, and time, that are read."""


@dataclasses.dataclass
class BatchesRead:
    """What was read. target, inputs: positions in a batch's tensors, once the step has told them."""

    train: list[Any]
    val: list[Any]
    loader: Any
    val_loader: Any
    loss: LossCall | None = None
    target: int | None = None
    inputs: list[int] = dataclasses.field(default_factory=list)

    @property
    def samples(self) -> int | None:
        try:
            return len(self.loader.dataset)
        except (AttributeError, TypeError):
            return None

    def roles(self, step: StepGraph, losses: Sequence[LossCall]) -> None:
        """Which tensors are targets and inputs, by what the step made of them."""
        self.loss = next((line for line in losses if line.target is not None), losses[0] if losses else None)
        self.target = None if self.loss is None else self.loss.target
        self.inputs = inputs.input_leaves(step, [line.target for line in losses], output_tensors(self.train[0]))

    def targets(self) -> list[torch.Tensor]:
        return [] if self.target is None else [t for b in self.train for t in inputs.picked(b, [self.target])]

    def labels(self) -> Labels | None:
        return labels(self.targets(), self.loss, self.loader)

    def shift(self) -> Shift | None:
        """Of the first floating input (or bytes) that both loaders give."""
        for leaf in self.inputs:
            train, val = ([t for b in batches for t in inputs.picked(b, [leaf])] for batches in (self.train, self.val))
            known = train and val and all(t.dtype == torch.uint8 or t.is_floating_point() for t in (train[0], val[0]))
            if known and (found := inputs.shift(train, val)) is not None:
                return dataclasses.replace(found, drift=self._drift(leaf))
        return None

    def _drift(self, leaf: int) -> float:
        """From the first to the last samples of the training set, in its own order, or else in the order read."""
        try:
            data, collate = self.loader.dataset, self.loader.collate_fn
            ends = (range(ENDS), range(len(data) - ENDS, len(data)))
            with unnoticed(data):
                first, last = (inputs.picked(collate([data[i] for i in end]), [leaf])[0] for end in ends)
            return inputs.drift(first, last)
        except Exception:  # the border: streams have no order of their own, lists of batches no dataset
            first, last = (inputs.picked(self.train[i], [leaf])[0] for i in (0, -1))
            return inputs.drift(first, last) if len(first) > 1 and len(last) > 1 else 0.0

    def overlap(self) -> Overlap | None:
        if not self.inputs:
            return None
        train = [
            (
                inputs.counted(b, self.inputs, self.target),
                None if self.target is None else next(iter(inputs.counted(b, [self.target], self.target)), None),
            )
            for b in self.train
        ]
        same = self.val_loader is not None and getattr(self.val_loader, "dataset", None) is getattr(
            self.loader, "dataset", self
        )
        return inputs.overlap(train, [inputs.counted(b, self.inputs, self.target) for b in self.val], same)


def read(loader: Any, val_loader: Any) -> BatchesRead:
    """The first batches of both, with all random numbers put back. A DataLoader is read through a shallow copy, so that
    workers that outlive a pass are not left behind in the user's own."""
    own, other = (copy.copy(one) if isinstance(one, DataLoader) else one for one in (loader, val_loader))
    return BatchesRead(batches_of(own, MOST, SECONDS), batches_of(other, MOST, SECONDS), loader, val_loader)


def ignores(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any, leaves: Sequence[int]) -> bool | None:
    """Whether the loss stays the same when the inputs are dealt to other samples; None where all samples are alike."""
    chosen = {id(t) for t in inputs.picked(batch, leaves)}
    rolled = tree_map_only(torch.Tensor, lambda t: t.roll(1, 0) if id(t) in chosen and t.dim() else t, batch)
    if not chosen or all(torch.equal(t, t.roll(1, 0)) for t in inputs.picked(batch, leaves) if t.dim()):
        return None
    values = []
    with quiet(model), unnoticed(ask), torch.no_grad():
        for part in (batch, rolled):
            torch.manual_seed(0)
            values.append(loss_value(ask(model, part)))
    return values[0] == values[1]
