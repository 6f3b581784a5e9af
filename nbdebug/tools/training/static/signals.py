"""The inputs: their scale where the first weights meet them, training against validation, rows that stand in both."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nbdebug.observe.tensors import output_tensors
from nbdebug.tools.training.facts import FirstLayer, Overlap, Shift, Weight
from nbdebug.tools.training.static.one_step import LEARNS, StepGraph, rms

NORMS = frozenset(
    {
        "batch_norm",
        "layer_norm",
        "group_norm",
        "instance_norm",
        "rms_norm",
        "native_layer_norm",
        "native_batch_norm",
        "normalize",
    }
)
ELEMENTS = 8
"""Rows with fewer numbers than this may meet by chance."""
LEAST = 16
"""Samples of either loader, below which nothing is compared."""
RARE = 10.0
"""Kurtosis of a feature that is nearly always the same: a word that is in one text of ten, say. A few validation
samples tell nothing of its deviation."""
CERTAIN = 4.0
"""Times the bits that pairs of rows need to be told apart: numbers in a row go together, so that it says less than
the sum of its numbers."""


def entries(step: StepGraph) -> tuple[FirstLayer, ...]:
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
        found.append(
            FirstLayer(
                call.module,
                call.op,
                top,
                len(sizes),
                sizes[top],
                means[top],
                stds[top],
                low,
                high,
                call.made or 0.0,
                id(call) in normalised,
                any(w.requires_grad for w in weights),
            )
        )
    return tuple({(e.module, e.op): e for e in reversed(found)}.values())


def input_leaves(step: StepGraph, targets: Iterable[int | None], batch: Sequence[torch.Tensor]) -> list[int]:
    """Positions of the batch's tensors that the first weights, or an embedding, are given."""
    calls, names = step.calls, {id(p) for _, p in step.calls.parameters}
    mask = 0
    for call in calls.calls:
        if call.op in LEARNS | {"embedding"} and any(id(t) in names for t in call.given):
            mask |= calls.dye(call.given[0]).leaves
    found = [i for i in calls.has(mask) if i not in set(targets)]
    return found or [i for i in range(len(batch)) if i not in set(targets)][:1]


class Summary:
    """Moments by channel or feature over a loader's batches, and the means of the samples."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        rows, moments = [], []
        for tensor in tensors:
            table = _by_feature(tensor.detach().cpu().double())
            rows.append(table.mean(2))
            moments.append(torch.stack([table.pow(k).mean(2).sum(0) for k in (2, 3, 4)]))
        self.rows = torch.cat(rows)
        self.mean = self.rows.mean(0)
        second, third, fourth = (m / len(self.rows) for m in torch.stack(moments).sum(0))
        variance = (second - self.mean.square()).clamp(min=0)
        self.std, self.error = variance.sqrt(), self.rows.std(0) / len(self.rows) ** 0.5
        around = fourth - 4 * self.mean * third + 6 * self.mean.square() * second - 3 * self.mean.pow(4)
        self.peaked = around / variance.square().clamp(min=1e-30)  # the kurtosis: 3 for a bell, 1/p for a rare event


def _by_feature(x: torch.Tensor) -> torch.Tensor:
    """(samples, features, the rest): channels come second in pictures, features last in tables and series."""
    if x.dim() == 1:
        return x.view(-1, 1, 1)
    return x.flatten(2) if x.dim() > 3 else x.unsqueeze(2) if x.dim() == 2 else x.transpose(1, 2)


def shift(train: Sequence[torch.Tensor], val: Sequence[torch.Tensor]) -> Shift | None:
    """Training inputs against validation inputs; None where they can't be compared, or hold rare events only."""
    if min(sum(map(len, train)), sum(map(len, val))) < LEAST:
        return None
    a, b = Summary(train), Summary(val)
    if a.mean.shape != b.mean.shape:
        return None
    alive = (a.std > 1e-6 * (1 + a.mean.abs())) & (a.peaked < RARE)
    if not bool(alive.any()):
        return None
    floor, middle = 1e-9, statistics.median
    moved = (b.mean - a.mean).abs()[alive]
    error = (a.error.square() + b.error.square()).sqrt()[alive]
    ratio = (b.std[alive] + floor) / (a.std[alive] + floor)
    return Shift(
        int(alive.sum()),
        (len(a.rows), len(b.rows)),
        (float(a.mean[alive].mean()), float(a.std[alive].mean())),
        (float(b.mean[alive].mean()), float(b.std[alive].mean())),
        middle((moved / (a.std[alive] + floor)).tolist()),
        middle(ratio.tolist()),
        middle((moved / (error + floor)).tolist()),
        _swapped(a.mean, b.mean, a.error, b.error),
    )


def drift(first: torch.Tensor, last: torch.Tensor) -> float:
    """How far the samples at the end of a dataset lie from those at its start, in deviations, in the middle feature:
    a series in time changes by more than one."""
    a, b = Summary([first]), Summary([last])
    return statistics.median(((b.mean - a.mean).abs() / ((a.std + b.std) / 2 + 1e-9)).tolist())


def _swapped(a: torch.Tensor, b: torch.Tensor, error_a: torch.Tensor, error_b: torch.Tensor) -> bool:
    """Three channels in reverse order (RGB and BGR): the means fit that way, and not the straight way."""
    if len(a) != 3:
        return False
    error = (error_a.square() + error_b.square()).sqrt() + 1e-9
    straight, reverse = ((a - b).abs() / error), ((a.flip(0) - b).abs() / error)
    return bool(straight[[0, 2]].min() > 6 and reverse.max() < 4)


def overlap(
    train: Sequence[tuple[list[torch.Tensor], torch.Tensor | None]], val: Sequence[list[torch.Tensor]], same: bool
) -> Overlap | None:
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
    tensors = output_tensors(batch)
    return [tensors[i] for i in leaves if i < len(tensors)]


def counted(batch: Any, leaves: Sequence[int], target: int | None) -> list[torch.Tensor]:
    """The same, and of their rows only those that a mask of the batch (True or False for each row) lets count: in one
    graph, nodes of training and of validation stand side by side in both. target: position of the targets, no mask."""
    masks: dict[int, torch.Tensor] = {}
    for i, t in enumerate(output_tensors(batch)):
        if t.dtype == torch.bool and t.dim() == 1 and i != target and i not in leaves:
            masks[len(t)] = t & masks[len(t)] if len(t) in masks else t
    return [t[masks[len(t)].to(t.device)] if t.dim() and len(t) in masks else t for t in picked(batch, leaves)]


ALIKE = 1e-6
"""Units are copies when their weights, and their gradients, differ by less than this part of their size."""


def weights(step: StepGraph) -> tuple[Weight, ...]:
    """One line for each matrix that multiplies, in the order of the first call."""
    calls = step.calls
    names = {id(p): name for name, p in calls.parameters if name}
    seen: dict[int, Weight] = {}
    for call in calls.calls:
        if call.op not in LEARNS or call.op in ("gru", "lstm", "rnn_tanh", "rnn_relu", "bmm", "einsum"):
            continue
        own = next((t for t in call.given if id(t) in names and t.dim() > 1), None)
        if own is None or id(own) in seen or not call.given or own is call.given[0] or not own.numel():
            continue
        came = rms(call.given[0]) if call.given[0].is_floating_point() else 0.0
        seen[id(own)] = _weight(names[id(own)], own, call, came, step.gradients.get(id(own)))
    lines = list(seen.values())
    return tuple(w if i < len(lines) - 1 else _last(w) for i, w in enumerate(lines))


def _weight(name: str, own: torch.Tensor, call: Any, came: float, gradient: torch.Tensor | None) -> Weight:
    w = own.detach().float()
    across = call.op in ("matmul", "__matmul__", "mm", "addmm") or "transpose" in call.op  # units are columns there
    fan_in = w.shape[0] if across else w[0].numel()
    table = w.transpose(0, 1).flatten(1) if across else w.flatten(1)
    slope = None
    if gradient is not None:
        g = gradient.detach().to_dense().float() if gradient.is_sparse else gradient.detach().float()
        slope = g.transpose(0, 1).flatten(1) if across else g.flatten(1)
    copies = len(table) > 1 and copied(table) and slope is not None and bool(slope.any()) and copied(slope)
    return Weight(
        name,
        name.rpartition(".")[0],
        call.op,
        float(w.std(unbiased=False)),
        math.sqrt(2 / max(1, fan_in)),
        came,
        call.made or 0.0,
        None if slope is None else rms(slope),
        copies,
        bool((w == w.flatten()[0]).all()),
        True,
        own.requires_grad,
    )


def _last(weight: Weight) -> Weight:
    return dataclasses.replace(weight, hidden=False)


def copied(table: torch.Tensor) -> bool:
    """Whether all rows are the same."""
    return float((table - table[:1]).abs().max()) <= ALIKE * float(table.abs().max())
