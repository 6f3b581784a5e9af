"""The inputs: their scale where the first weights meet them, training against validation, rows that stand in both."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nbdebug.chapters.training.before.calls import LEARNS
from nbdebug.chapters.training.before.step import Step
from nbdebug.chapters.training.facts_before import Entry, Overlap, Shift
from nbdebug.observe.tensors import tensors_made

NORMS = frozenset({"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "native_layer_norm",
                   "native_batch_norm", "normalize"})
ELEMENTS = 8
"""Rows with fewer numbers than this may meet by chance."""
CERTAIN = 4.0
"""Times the bits that pairs of rows need to be told apart: numbers in a row go together, so that it says less than
the sum of its numbers."""


def entries(step: Step) -> tuple[Entry, ...]:
    """The first layers: those that are given a floating input that no weight has touched."""
    calls, found = step.calls, []
    names = {id(p): p for _, p in calls.parameters}
    normalised = {id(calls.maker(t)) for call in calls.calls if call.op in NORMS for t in call.given[:1]}
    for call in calls.calls:
        weights = [names[id(t)] for t in call.given if id(t) in names]
        if call.op not in LEARNS or call.entered is None or not weights:
            continue
        sizes, means, stds, low, high = call.entered
        top = max(range(len(sizes)), key=lambda i: sizes[i])
        found.append(Entry(call.module, call.op, top, len(sizes), sizes[top], means[top], stds[top], low, high,
                           call.made or 0.0, id(call) in normalised, any(w.requires_grad for w in weights)))
    return tuple({(e.module, e.op): e for e in reversed(found)}.values())


def input_leaves(step: Step, targets: Iterable[int | None], batch: Sequence[torch.Tensor]) -> list[int]:
    """Positions of the batch's tensors that the first weights, or an embedding, are given."""
    calls, names = step.calls, {id(p) for _, p in step.calls.parameters}
    mask = 0
    for call in calls.calls:
        if call.op in LEARNS | {"embedding"} and any(id(t) in names for t in call.given):
            mask |= calls.dye(call.given[0]).leaves
    found = [i for i in calls.has(mask) if i not in set(targets)]
    return found or [i for i in range(len(batch)) if i not in set(targets)][:1]


class Summary:
    """Means and deviations by channel or feature over a loader's batches, with the spread between samples."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self.squares: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        x = x.detach().float().cpu()
        x = x.reshape(len(x), 1, -1) if x.dim() == 1 else x.reshape(*x.shape[:2], -1) if x.dim() > 3 else (
            x.unsqueeze(2) if x.dim() == 2 else x.transpose(1, 2))  # (N, features), or (N, moments, features)
        self.rows.append(x.mean(2))
        self.squares.append(x.square().mean(2))

    @property
    def count(self) -> int:
        return sum(len(r) for r in self.rows)

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(mean, deviation, standard error of the mean) by feature."""
        rows, squares = torch.cat(self.rows), torch.cat(self.squares)
        mean = rows.mean(0)
        std = (squares.mean(0) - mean.square()).clamp(min=0).sqrt()
        return mean, std, rows.std(0) / max(1, len(rows)) ** 0.5


def shift(train: Sequence[torch.Tensor], val: Sequence[torch.Tensor]) -> Shift | None:
    """Training inputs against validation inputs; None where they can't be compared."""
    a, b = Summary(), Summary()
    for summary, tensors in ((a, train), (b, val)):
        for tensor in tensors:
            summary.add(tensor)
    if a.count < 16 or b.count < 16:
        return None
    (mean_a, std_a, error_a), (mean_b, std_b, error_b) = a.numbers(), b.numbers()
    if mean_a.shape != mean_b.shape:
        return None
    alive = (std_a > 1e-6 * (1 + mean_a.abs())) | (std_b > 1e-6 * (1 + mean_b.abs()))
    if not bool(alive.any()):
        return None
    floor = 1e-9
    moved = (mean_b - mean_a).abs()[alive]
    error = (error_a.square() + error_b.square()).sqrt()[alive]
    middle = statistics.median
    return Shift(int(alive.sum()), (a.count, b.count), (float(mean_a[alive].mean()), float(std_a[alive].mean())),
                 (float(mean_b[alive].mean()), float(std_b[alive].mean())),
                 middle((moved / (std_a[alive] + floor)).tolist()),
                 middle(((std_b[alive] + floor) / (std_a[alive] + floor)).tolist()),
                 middle((moved / (error + floor)).tolist()), _swapped(mean_a, mean_b, error_a, error_b))


def _swapped(a: torch.Tensor, b: torch.Tensor, error_a: torch.Tensor, error_b: torch.Tensor) -> bool:
    """Three channels in reverse order (RGB and BGR): the means fit that way, and not the straight way."""
    if len(a) != 3:
        return False
    error = (error_a.square() + error_b.square()).sqrt() + 1e-9
    straight, reverse = ((a - b).abs() / error), ((a.flip(0) - b).abs() / error)
    return bool(straight[[0, 2]].min() > 6 and reverse.max() < 4)


def overlap(train: Sequence[tuple[list[torch.Tensor], torch.Tensor | None]], val: Sequence[list[torch.Tensor]],
            same: bool) -> Overlap | None:
    """Rows of validation that were seen in training, by the hash of their inputs."""
    known: Counter[bytes] = Counter()
    labels: dict[bytes, set[Any]] = defaultdict(set)
    for inputs, target in train:
        names = list(hashes(inputs))
        known.update(names)
        if target is not None and target.dim() == 1 and len(target) == len(names):
            for name, label in zip(names, target.tolist()):
                labels[name].add(label)
    seen = [h for inputs in val for h in hashes(inputs)]
    if not known:
        return None
    twice = sum(count for count in known.values() if count > 1)
    clashing = sum(known[h] for h, got in labels.items() if len(got) > 1)
    total = sum(known.values())
    sample = [t for inputs, _ in train[:16] for t in inputs[:1]]
    unlikely = bool(sample) and bits(torch.cat(sample)) > CERTAIN * math.log2(max(2, total * len(seen)))
    return Overlap(len(seen), sum(h in known for h in seen), total, twice / total, clashing / total, same, unlikely)


def bits(rows: torch.Tensor) -> float:
    """How much a row tells at most: the sum over its numbers of their entropy in bits; 0 for whole numbers (words that
    people write again and again), and for numbers that are mostly the same."""
    if not rows.is_floating_point() or rows.dim() < 2:
        return 0.0
    table = rows.detach().cpu().flatten(1)[:1000, :256]
    told = 0.0
    for column in table.unbind(1):
        share = column.unique(return_counts=True)[1] / len(column)
        told -= float((share * share.log2()).sum())
    return told


def hashes(inputs: Sequence[torch.Tensor]) -> Iterable[bytes]:
    """A hash of each row over all inputs; nothing where rows are too short to tell anything."""
    tables = [t.detach().cpu().contiguous() for t in inputs if t.dim() > 1]
    if not tables or len({len(t) for t in tables}) > 1 or sum(t[0].numel() for t in tables if len(t)) < ELEMENTS:
        return
    for i in range(len(tables[0])):
        digest = hashlib.blake2b(digest_size=12)
        for table in tables:
            digest.update(table[i].contiguous().view(torch.uint8).numpy().tobytes())
        yield digest.digest()


def picked(batch: Any, leaves: Sequence[int]) -> list[torch.Tensor]:
    """The batch's tensors at these positions."""
    tensors = tensors_made(batch)
    return [tensors[i] for i in leaves if i < len(tensors)]

