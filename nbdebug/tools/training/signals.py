"""What goes through the model: the scale of the inputs, the initial weights, activations, gradients through depth and
time; and what rows of training and validation, or columns and labels, have in common.

Every ReLU, sigmoid and tanh is recorded, whether it is a module or a function: both end in the same call of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.observe.tensors import output_tensors, read_scalars
from nbdebug.tools.training.evaluate import LossFn, loss_root, mode, preserve_rng
from nbdebug.tools.training.facts import LayerSignal, TimeGradient
from nbdebug.tools.training.one_step import WEIGHTED_OPS, Calls, OpCall, StepGraph, modules_followed, rms
from nbdebug.tools.training.static_facts import (
    FirstLayer,
    InitialWeight,
    InputShift,
    Overlap,
    SharedGroups,
    TellingFeature,
    UnitsFact,
)

NORMS = frozenset(
    "batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm native_batch_norm normalize".split()
)
NOT_A_SIGNAL = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu", "bmm", "einsum"})
"""Ops with weights of which no single matrix is that of a layer."""
ELEMENTS = 8
"""Rows with fewer numbers than this may be equal by chance."""
EXACT = 1e-4
"""By so much mean and deviation of a set that was scaled by its own may be off 0 and 1: rounding in float32."""
LEAST = 16
"""Samples of either loader, below which nothing is compared."""
RARE = 10.0
"""Kurtosis of a feature that is nearly always the same: a word that is in one text of ten, say. A few validation
samples tell nothing of its deviation."""
CERTAIN = 4.0
"""Times the bits that pairs of rows need to be told apart: numbers in a row go together, so that it says less than
the sum of its numbers."""
ALIKE = 1e-6
"""Units are copies when their weights, and their gradients, differ by less than this part of their size."""


# Tensors of a batch


def tensors_at(batch: Any, leaves: Sequence[int]) -> list[torch.Tensor]:
    """The batch's tensors at these positions."""
    tensors = output_tensors(batch)
    return [tensors[i] for i in leaves if i < len(tensors)]


def unmasked_tensors_at(batch: Any, leaves: Sequence[int], target: int | None) -> list[torch.Tensor]:
    """The same without the rows that a mask of the batch (True or False for each row) leaves out: in one graph, nodes
    of training and of validation are side by side in both. target: position of the targets, which are no mask."""
    masks: dict[int, torch.Tensor] = {}
    for i, t in enumerate(output_tensors(batch)):
        if t.dtype == torch.bool and t.dim() == 1 and i != target and i not in leaves:
            masks[len(t)] = t & masks[len(t)] if len(t) in masks else t
    return [t[masks[len(t)].to(t.device)] if t.dim() and len(t) in masks else t for t in tensors_at(batch, leaves)]


# One step: inputs and weights


def first_layers(step: StepGraph) -> tuple[FirstLayer, ...]:
    """The layers whose input is a floating tensor that no weight has touched."""
    calls, layers = step.calls, []
    parameters = {id(p): p for _, p in calls.parameters}
    normalized = {id(calls.maker(t)) for call in calls.calls if call.op in NORMS for t in call.inputs[:1]}
    for call in calls.calls:
        weights = [parameters[id(t)] for t in call.inputs if id(t) in parameters]
        if call.op not in WEIGHTED_OPS or call.input_stats is None or not weights:
            continue
        sizes, means, stds, low, high = call.input_stats
        top = max(range(len(sizes)), key=lambda i: sizes[i])
        layers.append(
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
                call.output_rms or 0.0,
                id(call) in normalized,
                any(w.requires_grad for w in weights),
            )
        )
    return tuple({(layer.module, layer.op): layer for layer in reversed(layers)}.values())


def input_leaves(step: StepGraph, targets: Iterable[int | None], batch: Sequence[torch.Tensor]) -> list[int]:
    """Positions of the batch's tensors that go into the first weights, or into an embedding."""
    calls, parameters = step.calls, {id(p) for _, p in step.calls.parameters}
    mask = 0
    for call in calls.calls:
        if call.op in WEIGHTED_OPS | {"embedding"} and any(id(t) in parameters for t in call.inputs):
            mask |= calls.dependence(call.inputs[0]).leaves
    leaves = [i for i in calls.positions(mask) if i not in set(targets)]
    return leaves or [i for i in range(len(batch)) if i not in set(targets)][:1]


def initial_weights(step: StepGraph) -> tuple[InitialWeight, ...]:
    """One line for each matrix that multiplies, in the order of the first call; where there is none, for each table
    whose rows are multiplied with each other."""
    return _initial_weights(step, WEIGHTED_OPS - NOT_A_SIGNAL) or _initial_weights(step, frozenset({"embedding"}))


def _initial_weights(step: StepGraph, ops: frozenset[str]) -> tuple[InitialWeight, ...]:
    calls = step.calls
    names = {id(p): name for name, p in calls.parameters if name}
    weights: dict[int, InitialWeight] = {}
    for call in calls.calls:
        if call.op not in ops:
            continue
        pairs = ((t, _untransposed(calls, t)) for t in call.inputs[1:] if t.dim() > 1)
        used, own = next(((t, p) for t, p in pairs if id(p) in names), (None, None))
        if used is None or own is None or id(own) in weights or not own.numel():
            continue
        if call.op == "embedding" and own.shape[-1] == 1:  # what is added to a product
            continue
        input_rms = rms(call.inputs[0]) if call.inputs[0].is_floating_point() else 0.0
        gradient = step.gradients.get(id(own))
        gradient = gradient.t() if gradient is not None and used is not own else gradient
        weights[id(own)] = _initial_weight(names[id(own)], used, call, input_rms, gradient)
    last = next(reversed(weights), None)
    return tuple(dataclasses.replace(w, hidden=key != last) for key, w in weights.items())


def _untransposed(calls: Calls, tensor: torch.Tensor) -> torch.Tensor:
    """The matrix of which this is the transpose; else the tensor itself."""
    call = calls.dependence(tensor).maker
    turned = call is not None and call.op in ("T", "mT", "t", "transpose") and call.inputs[0].dim() == 2
    return call.inputs[0] if call is not None and turned else tensor


def _initial_weight(
    name: str, own: torch.Tensor, call: OpCall, input_rms: float, gradient: torch.Tensor | None
) -> InitialWeight:
    w = own.detach().float()
    columns = call.op in ("matmul", "__matmul__", "mm", "addmm") or "transpose" in call.op  # units are columns there

    def by_unit(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.transpose(0, 1).flatten(1) if columns else matrix.flatten(1)

    slope = None
    if gradient is not None:
        g = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        slope = by_unit(g.float())
    table = by_unit(w)
    copies = len(table) > 1 and _equal_rows(table) and slope is not None and bool(slope.any()) and _equal_rows(slope)
    return InitialWeight(
        name,
        name.rpartition(".")[0],
        call.op,
        float(w.std(unbiased=False)),
        math.sqrt(2 / max(1, w.shape[0] if columns else w[0].numel())),
        input_rms,
        call.output_rms or 0.0,
        None if slope is None else rms(slope),
        copies,
        bool((w == w.flatten()[0]).all()),
        True,
        own.requires_grad,
    )


def _equal_rows(table: torch.Tensor) -> bool:
    return float((table - table[:1]).abs().max()) <= ALIKE * float(table.abs().max())


# Training against validation


class Moments:
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
        self.kurtosis = around / variance.square().clamp(min=1e-30)  # 3 for a bell, 1/p for a rare event


def _by_feature(x: torch.Tensor) -> torch.Tensor:
    """(samples, features, the rest): channels come second in images, features last in tables and series."""
    if x.dim() == 1:
        return x.view(-1, 1, 1)
    return x.flatten(2) if x.dim() > 3 else x.unsqueeze(2) if x.dim() == 2 else x.transpose(1, 2)


def input_shift(train: Sequence[torch.Tensor], val: Sequence[torch.Tensor]) -> InputShift | None:
    """Training inputs against validation inputs; None where they can't be compared, or hold rare events only."""
    if min(sum(map(len, train)), sum(map(len, val))) < LEAST:
        return None
    a, b = Moments(train), Moments(val)
    if a.mean.shape != b.mean.shape:
        return None
    alive = (a.std > 1e-6 * (1 + a.mean.abs())) & (a.kurtosis < RARE)
    if not bool(alive.any()):
        return None
    floor, median = 1e-9, statistics.median
    moved = (b.mean - a.mean).abs()[alive]
    error = (a.error.square() + b.error.square()).sqrt()[alive]
    ratio = (b.std[alive] + floor) / (a.std[alive] + floor)
    return InputShift(
        int(alive.sum()),
        (len(a.rows), len(b.rows)),
        (float(a.mean[alive].mean()), float(a.std[alive].mean())),
        (float(b.mean[alive].mean()), float(b.std[alive].mean())),
        median((moved / (a.std[alive] + floor)).tolist()),
        median(ratio.tolist()),
        median((moved / (error + floor)).tolist()),
        _channels_swapped(a, b),
        all(_is_standardized(side, alive) for side in (a, b)),
    )


def _is_standardized(side: Moments, alive: torch.Tensor) -> bool:
    """Whether the set as a whole has mean 0 and deviation 1, of all values or of one less, and no single sample has."""
    n, std = len(side.rows), side.std[alive]
    exact = torch.minimum((std - 1).abs(), (std * (n / max(n - 1, 1)) ** 0.5 - 1).abs()) < EXACT
    by_sample = float(side.rows[:, alive].abs().max()) < EXACT
    return n >= LEAST and bool(exact.all()) and float(side.mean[alive].abs().max()) < EXACT and not by_sample


def _channels_swapped(a: Moments, b: Moments) -> bool:
    """Three channels in reverse order (RGB and BGR): the means fit that way, and not the straight way."""
    if len(a.mean) != 3:
        return False
    error = (a.error.square() + b.error.square()).sqrt() + 1e-9
    straight, reverse = ((a.mean - b.mean).abs() / error), ((a.mean.flip(0) - b.mean).abs() / error)
    return bool(straight[[0, 2]].min() > 6 and reverse.max() < 4)


def drift(first: torch.Tensor, last: torch.Tensor) -> float:
    """How far the samples at the end of a dataset are from those at its start, in deviations, in the middle feature:
    a series in time changes by more than one."""
    a, b = Moments([first]), Moments([last])
    return statistics.median(((b.mean - a.mean).abs() / ((a.std + b.std) / 2 + 1e-9)).tolist())


def overlap(
    train: Sequence[tuple[list[torch.Tensor], torch.Tensor | None]], val: Sequence[list[torch.Tensor]], same: bool
) -> Overlap | None:
    """Rows of validation that are in training too, by the hash of their inputs. train: inputs and targets of each
    batch; same: both loaders read the same dataset."""
    known: Counter[bytes] = Counter()
    labels: dict[bytes, set[Any]] = defaultdict(set)
    for inputs, target in train:
        hashes = list(_row_hashes(inputs))
        known.update(hashes)
        if target is not None and target.dim() == 1 and len(target) == len(hashes):
            for row, label in zip(hashes, target.tolist()):
                labels[row].add(label)
    if not known:
        return None
    rows = [row for inputs in val for row in _row_hashes(inputs)]
    twins = sum(count for count in known.values() if count > 1)
    conflicts = sum(known[row] for row, own in labels.items() if len(own) > 1)
    total = sum(known.values())
    sample = [t for inputs, _ in train[:16] for t in inputs[:1]]
    distinctive = bool(sample) and row_bits(torch.cat(sample)) > CERTAIN * math.log2(max(2, total * len(rows)))
    shared = sum(row in known for row in rows)
    return Overlap(len(rows), shared, total, twins / total, conflicts / total, same, distinctive)


def row_bits(rows: torch.Tensor) -> float:
    """How much a row tells at most: the sum over its numbers of their entropy in bits; 0 for whole numbers (words that
    people write again and again), and for numbers that are mostly the same."""
    if not rows.is_floating_point() or rows.dim() < 2:
        return 0.0
    entropy = 0.0
    for column in rows.detach().cpu().flatten(1)[:1000, :256].unbind(1):
        share = column.unique(return_counts=True)[1] / len(column)
        entropy -= float((share * share.log2()).sum())
    return entropy


def _row_hashes(inputs: Sequence[torch.Tensor]) -> Iterable[bytes]:
    """A hash of each row over all inputs; nothing where rows are too short to tell anything."""
    tables = [t.detach().cpu().contiguous() for t in inputs if t.dim() > 1]
    if not tables or len({len(t) for t in tables}) > 1 or sum(t[0].numel() for t in tables if len(t)) < ELEMENTS:
        return
    for i in range(len(tables[0])):
        digest = hashlib.blake2b(digest_size=12)
        for table in tables:
            digest.update(table[i].contiguous().view(torch.uint8).numpy().tobytes())
        yield digest.digest()


CLOSE, MOST_ROWS = 0.25, 400
"""A row is a near copy when it is nearer to a training row than this part of the median distance of training rows to
their own nearest. So many rows are compared at most."""
SHIFTS = (1, 2, 3)
"""Steps by which windows that overlap are moved."""


def near_copies(train: torch.Tensor, val: torch.Tensor) -> tuple[float, float]:
    """Shares of validation and of training rows that have a near copy among the (other) training rows; or, of windows
    over one series, the share that is a training row moved by some steps. (0, 0) where rows can't tell."""
    if not train.is_floating_point() or train.shape[1:] != val.shape[1:] or min(len(train) // 2, len(val)) < LEAST:
        return 0.0, 0.0
    a, b = (rows.detach().cpu().float().flatten(1) for rows in (train, val[:MOST_ROWS]))
    if a.shape[1] < ELEMENTS:
        return 0.0, 0.0
    own = torch.cdist(a[:MOST_ROWS], a)
    own[range(len(own)), range(len(own))] = math.inf
    own_nearest, nearest = own.amin(1), torch.cdist(b, a).amin(1)
    limit = CLOSE * float(own_nearest.median())
    if limit <= 0:
        return 0.0, 0.0
    shares = float((nearest < limit).float().mean()), float((own_nearest < limit).float().mean())
    return max(shares, (_moved(a, b), 0.0))


def _moved(train: torch.Tensor, val: torch.Tensor) -> float:
    """The share of rows that hold the same values as a training row, moved by some steps."""
    width, moved = train.shape[1], torch.zeros(len(val), dtype=torch.bool, device="cpu")
    for shift in (s for s in SHIFTS if width - s >= ELEMENTS):
        for known, rows in ((train[:, shift:], val[:, :-shift]), (train[:, :-shift], val[:, shift:])):
            hashes = {row.numpy().tobytes() for row in known.contiguous()}
            moved |= torch.tensor([row.numpy().tobytes() in hashes for row in rows.contiguous()], device="cpu")
    return float((moved & (val.std(1) > 0)).float().mean())


SAME, LEFT_OPEN, EXPLAINED = 1e-9, 0.01, 0.3
"""A column is the target where a line through it leaves no more than the first of the variance, or up to the second
where the other columns do not tell the rest (no more of it than the third: else the column is a strong feature) …"""
OTHERS_LEAVE, TIMES = (0.05, 0.95), 20.0
"""… and these leave a share of the target open between the two, and so many times what the column does: the last value
of a smooth series tells the next one, but so does the one before; and where the others tell nothing, the column is the
one feature that there is, as in data made by hand."""
AGREES, OF_EACH = 0.97, 0.95
"""Share of the labels that a column of as many values tells, and share of each label."""
GROUPS, IN_EACH, MEET = (3, 8), 3, 0.5
"""Groups of samples (at least so many; of those without a name the second number), samples in each, and share of the
validation samples whose group training has too."""
ALIKE, ALIKE_COLUMN = 0.2, 0.6
"""How much more often than by chance (and three times as often) the nearest training sample is of the same group; of
a column of the inputs, how often at least."""


def target_columns(x: torch.Tensor, target: torch.Tensor) -> dict[int, float]:
    """Columns of a table that are the target, in another unit or with a little noise, or value by value → the share of
    its variance that they leave open. x: (N, F), target: (N)."""
    table = x.detach().cpu()
    x, y = table.double(), target.detach().cpu().double()
    if not 3 <= x.shape[1] <= 500 or len(x) < max(3 * x.shape[1], 2 * LEAST) or len(y.unique()) < 2 * ELEMENTS:
        return {}
    x, y = x - x.mean(0), y - y.mean()
    live, total = x.std(0) > 0, float(y.square().sum())
    slopes = torch.where(live, (x * y[:, None]).sum(0) / x.square().sum(0).clamp_min(1e-300), 0.0)
    left = (y[:, None] - x * slopes).square().sum(0) / total
    near = (left < LEFT_OPEN).nonzero().flatten().tolist()
    others = x[:, [i for i in range(x.shape[1]) if i not in near and bool(live[i])]]

    def left_by_others(y: torch.Tensor) -> float:  # for their number
        if not others.shape[1]:
            return 1.0
        rest = (y - _fitted(others, y[:, None])[:, 0]).square().sum() / y.square().sum()
        return float(rest) * len(y) / max(1, len(y) - others.shape[1])

    by_others = left_by_others(y)
    known = {}
    for column in near:
        own = float(left[column])
        explained = 0.0 if own < SAME else 1 - left_by_others(y - x[:, column] * slopes[column])
        elsewhere = torch.isin(target.detach().cpu(), table[:, column]) & (target.detach().cpu() != table[:, column])
        series = float(elsewhere.double().mean()) > 0.5  # it is the column's value in another row: what comes next
        low, high = OTHERS_LEAVE
        alone = bool((table[:, column] == target.detach().cpu()).all()) or by_others > max(low, TIMES * own)
        if alone and by_others < high and explained < EXPLAINED and not series:
            known[column] = own
    return known


def _fitted(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
    """What the linear function of x that fits y best gives for the rows `at` (those of x). x: (N, F), y: (N, k)."""
    return (x if at is None else at) @ torch.linalg.lstsq(x, y, driver="gelsd").solution


def copied_columns(x: torch.Tensor, target: torch.Tensor) -> dict[int, float]:
    """Columns of a table that are columns of the target, each of them. x: (N, F), target: (N, k). What gives most of
    its inputs back (an autoencoder, with a condition or without) has none."""
    x, y = x.detach().cpu(), target.detach().cpu()
    if len(x) < 2 * LEAST or not 4 <= 2 * y.shape[1] <= x.shape[1] <= 500:
        return {}
    same = (x[:, :, None] == y[:, None, :]).all(0) & (x.std(0) > 0)[:, None]
    return dict.fromkeys(same.any(1).nonzero().flatten().tolist(), 0.0) if bool(same.any(0).all()) else {}


def same_numbers(x: torch.Tensor, target: torch.Tensor) -> dict[int, float]:
    """Places of a window of several quantities, flattened, that hold the target itself in all samples. x: (N, T, F);
    target: N numbers. An input that is given back whole has more targets than one."""
    x, y = x.detach().cpu().flatten(1), target.detach().cpu()
    if y.numel() != len(x) or not (x.is_floating_point() and y.is_floating_point()) or len(y.unique()) < 2 * LEAST:
        return {}
    return dict.fromkeys((x == y.reshape(-1, 1)).all(0).nonzero().flatten().tolist(), 0.0)


BETWEEN, PAIRS, NOMINAL, BORDERS = 0.2, 3, 0.3, 20_000
"""Share of the borders of a mask with one pixel of a number between, in so many pairs of classes at least (a class of
its own for outlines lies between one pair); share of the other borders whose numbers do not follow each other: of
depths or heights nearly all do. After so many borders no further batch is looked at."""


def interpolated(masks: Iterable[torch.Tensor]) -> bool:
    """Whether masks of class numbers were resized by averages of them: between two classes lies one pixel of a class
    whose number is between theirs. masks: (N, H, W), whole numbers."""
    between, others, outside = Counter[tuple[int, ...]](), Counter[tuple[int, ...]](), 0
    for mask in masks:
        for rows in (mask.cpu(), mask.cpu().transpose(-1, -2)):
            runs = [rows[..., i : rows.shape[-1] - 4 + i] for i in range(5)]
            a, c, low, high = runs[1], runs[3], torch.minimum(runs[1], runs[3]), torch.maximum(runs[1], runs[3])
            ends = (runs[0] == a) & (runs[4] == c) & (a != c)
            thin = ends & (low < runs[2]) & (runs[2] < high)
            sharp = ends & (runs[2] == c)
            outside += int((ends & ((runs[2] < low) | (runs[2] > high))).sum())
            between.update(map(tuple, torch.stack([low[thin], runs[2][thin], high[thin]], 1).tolist()))
            others.update(map(tuple, torch.stack([low[sharp], high[sharp]], 1).tolist()))
        if between.total() + others.total() > BORDERS:
            break
    nominal = sum(n for (low, high), n in others.items() if high - low > 1) >= NOMINAL * max(others.total(), 1)
    pairs, middles = {(row[0], row[2]) for row in between}, {row[1] for row in between}
    enough = between.total() > max(BETWEEN * (between.total() + others.total()), LEAST, 3 * outside)
    return nominal and enough and len(pairs) >= PAIRS and len(middles) > 1


TIGHT, ABOVE_COMMONEST = 0.1, 0.05
"""A column of more values than labels gives each label away where no label's values spread wider than this share of the
distance between two labels' means; the other columns must tell this much more than the commonest label, and not all: a
feature that is the only one, or one of many that tell, is none that came from the label."""


def label_columns(x: torch.Tensor, labels: torch.Tensor) -> tuple[bool, dict[int, float]]:
    """(whether they are the label in other numbers, columns that give it away → the share that they do not tell).

    The label in other numbers: one value for each label, and as many; or a column of an own 0 or 1 for each label. Of
    tables (two dimensions) also what tells nearly each label, with as many values as there are labels or with a narrow
    range for each. x: (N, …), columns are those of the flattened samples; labels: (N)."""
    table = x.dim() == 2
    floating, x, labels = x.is_floating_point(), x.detach().cpu().float().flatten(1), labels.cpu()
    classes, count = labels.unique(return_counts=True)
    if x.shape[1] < 3 or not 2 <= len(classes) <= 100 or len(x) < max(4 * len(classes), 2 * LEAST):
        return True, {}
    rows = [x[labels == c] for c in classes]
    if floating and (same := _in_other_numbers(rows)):
        return True, dict.fromkeys(same, 0.0)
    if not table or len(classes) > 20 or len(x) < max(20 * len(classes), 4 * LEAST):
        return False, {}
    known, narrow = {}, []
    for column in range(min(x.shape[1], 500)):
        values, place = x[:, column].unique(return_inverse=True)
        if len(values) > len(classes) and _width([r[:, column] for r in rows]) < TIGHT:
            narrow.append(column)
        if len(values) == len(classes):
            counts = torch.stack([place[labels == c].bincount(minlength=len(values)) for c in classes])
            known[column] = _not_told(counts)
    known = {column: wrong for column, wrong in known.items() if 0 < wrong < 1 - AGREES}
    if narrow:
        told = _told_by(x[:, [c for c in range(x.shape[1]) if c not in narrow]], labels)
        if float(count.max()) / len(labels) + ABOVE_COMMONEST < told < 1 - ABOVE_COMMONEST:
            known |= dict.fromkeys(narrow, 0.0)
    return False, known


def _in_other_numbers(rows: list[torch.Tensor]) -> list[int]:
    """Columns that are the label. rows: (samples of a label, columns), for each label."""
    constant = torch.stack([(r == r[:1]).all(0) for r in rows]).all(0)
    values = torch.stack([r[0] for r in rows])
    whole = constant & (values.sort(0).values.diff(dim=0) > 0).all(0)
    single = constant & (values > values.amin(0)).sum(0).eq(1)
    marked = values.argmax(0)[single].unique()
    return (whole if bool(whole.any()) or len(marked) < len(rows) else single).nonzero().flatten().tolist()


def _not_told(table: torch.Tensor) -> float:
    """The share of samples with another value than most of their label; 1 where most of two labels have the same, or
    too few of one label any. table: counts (labels, values)."""
    hits, best = table.max(1)
    clear = len(best.unique()) == len(table) and bool((hits > OF_EACH * table.sum(1)).all())
    return 1 - float(hits.sum() / table.sum()) if clear else 1.0


def _width(values: list[torch.Tensor]) -> float:
    """The widest spread of a label over the smallest distance of two means. values: a column's, by label."""
    means = torch.stack([v.mean() for v in values]).sort().values
    wide = max(float(v.std()) for v in values if len(v) > 1)
    return wide / max(1e-30, float(means.diff().min())) if bool(torch.isfinite(means).all()) else math.inf


def _told_by(x: torch.Tensor, labels: torch.Tensor, fit: torch.Tensor | None = None) -> float:
    """The share of the labels that a linear function of x tells. fit: the samples that it is fitted on, while the
    others are judged; else all of them both times."""
    if not x.shape[1]:
        return 0.0
    x = torch.cat([x, torch.ones(len(x), 1, device="cpu")], 1).double()
    wanted = torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).double()
    fit, judge = (fit, ~fit) if fit is not None else (torch.ones(len(x), dtype=torch.bool, device="cpu"),) * 2
    return float((_fitted(x[fit], wanted[fit], x[judge]).argmax(1) == wanted[judge].argmax(1)).double().mean())


TELLS, OTHERS_TELL, SAMPLES = 0.99, 0.9, 1000
"""Share of each label's samples that one feature tells, on samples that were not used to find it; of the next feature,
at most (else the classes lie far apart, and no feature is alone); samples that are looked at."""
EACH, HALVES, TOGETHER, BEST = 20, 0.2, 0.8, 50
"""It is a leak, and not only a question, where it tells the labels of validation samples as well (so many of each label
at least), with a spread of at most this share of the distance of two labels' means (the halves of one bump, of which a
label is made by a threshold, have 0.29 at the least: those of even numbers), and where all the others together (the
fifty that tell most) tell at most that share, but more than the commonest label: a feature that others support is
strong, one that stands alone is what data made by hand has."""


def telling_feature(
    x: torch.Tensor, labels: torch.Tensor, val: tuple[torch.Tensor, torch.Tensor] | None = None
) -> TellingFeature | None:
    """The one feature that tells the label: by the nearest mean of the classes on the other half of the samples. x: (N,
    …), floats, or tokens (N, T), of which presence counts. val: the same of validation."""
    x, labels = x.detach().cpu()[:SAMPLES], labels.cpu()[:SAMPLES]
    classes, kind = labels.unique(), "column" if x.dim() == 2 else "number"
    names: Any = None
    if not x.is_floating_point():
        if x.dim() != 2 or x.dtype == torch.bool:
            return None
        names, place = x.unique(return_inverse=True)
        if not 8 <= len(names) <= 5000:
            return None
        kind, x = "token", torch.zeros(len(x), len(names), device="cpu").scatter_(1, place, 1.0)
    x = x.float().flatten(1)
    if not (3 <= x.shape[1] <= 5000 and 2 <= len(classes) <= 20 and len(x) >= 40 * len(classes)):
        return None
    even = torch.arange(len(x), device="cpu") % 2 == 0
    if not bool(torch.isfinite(x).all()) or min(int((labels[even] == c).sum()) for c in classes) < 5:
        return None
    means = torch.stack([x[even & (labels == c)].mean(0) for c in classes])
    right = _nearest_is_right(x[~even], labels[~even], means, classes)
    top = int(right.argmax())
    alike = torch.corrcoef(x.T)[top].abs().nan_to_num(0.0) > OTHERS_TELL if x.shape[1] <= 1000 else right < 0
    alike[top] = True
    others = float(right[~alike].max()) if bool((~alike).any()) else 1.0
    if float(right[top]) < TELLS or others > OTHERS_TELL:
        return None
    feature = TellingFeature(kind, top if names is None else int(names[top]), float(right[top]))
    if val is None or _width([x[labels == c, top] for c in classes]) > HALVES:
        return feature
    at, answers = val[0].detach().cpu(), val[1].cpu()
    at = at.float().flatten(1)[:, [top]] if names is None else (at == names[top]).any(1, keepdim=True).float()
    if min(int((answers == c).sum()) for c in classes) < EACH or not bool(torch.isin(answers, classes).all()):
        return feature
    best = right.masked_fill(alike, -1.0).topk(min(BEST, int((~alike).sum()))).indices
    together = _told_by(x[:, best], labels, even)
    commonest = float(labels.unique(return_counts=True)[1].max()) / len(labels)
    share = float(_nearest_is_right(at, answers, means[:, [top]], classes)[0])
    leaks = share >= TELLS and commonest + ABOVE_COMMONEST < together < TOGETHER
    return dataclasses.replace(feature, share=share, others=together) if leaks else feature


def _nearest_is_right(
    x: torch.Tensor, labels: torch.Tensor, means: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """Of each feature the share of the samples of that label, of which it tells the fewest, whose own label has the
    nearest mean. x: (N, F), means: (classes, F)."""
    best = torch.full(x.shape, math.inf, device="cpu")
    choice = torch.zeros_like(best, dtype=torch.long)
    for index, mean in enumerate(means):
        distance = (x - mean).abs()
        choice[distance < best] = index
        best = torch.minimum(best, distance)
    return torch.stack([(choice[labels == c] == i).float().mean(0) for i, c in enumerate(classes)]).amin(0)


@dataclasses.dataclass
class Grouped:
    """Samples and their groups. x: (N, numbers); keys: (N); targets: (N) or None."""

    x: torch.Tensor
    keys: list[Any]
    targets: torch.Tensor | None

    @classmethod
    def of(cls, rows: Sequence[tuple[torch.Tensor, list[Any], torch.Tensor | None]], most: int) -> Grouped | None:
        if not rows or len({x.shape[1:] for x, _, _ in rows}) > 1:
            return None
        targets = [t for _, _, t in rows if t is not None and t.numel() == len(t)]
        whole = torch.cat([t.detach().cpu().flatten() for t in targets])[:most] if len(targets) == len(rows) else None
        return cls(torch.cat([x for x, _, _ in rows])[:most], [k for _, keys, _ in rows for k in keys][:most], whole)

    def is_mixed(self) -> bool:
        """Whether samples of most groups have different targets."""
        if self.targets is None:
            return True
        kinds: dict[Any, set[Any]] = defaultdict(set)
        for key, target in zip(self.keys, self.targets.tolist()):
            kinds[key].add(target)
        return sum(len(own) > 1 for own in kinds.values()) > len(kinds) / 2


def shared_groups(train: Grouped, val: Grouped, least: int = GROUPS[0]) -> SharedGroups | None:
    """Groups on both sides whose samples are alike: the nearest training sample is of the same group far more often
    than by chance."""
    sizes = Counter(train.keys)
    seen = [key in sizes for key in val.keys]
    total = len(train.keys)
    if len(sizes) < least or total < IN_EACH * len(sizes) or sum(seen) < max(LEAST, MEET * len(seen)):
        return None
    if train.x.shape[1:] != val.x.shape[1:]:
        return None
    mean, std = train.x.mean(0), train.x.std(0)
    a, b = ((part.x - mean) / torch.where(std > 0, std, torch.ones_like(std)) for part in (train, val))
    nearest = torch.cdist(b, a).argmin(1).tolist()
    alike = sum(train.keys[i] == key for i, key in zip(nearest, val.keys)) / len(val.keys)
    by_chance = sum(sizes[key] for key in val.keys) / total / len(val.keys)
    if alike < max(3 * by_chance, by_chance + ALIKE):
        return None
    return SharedGroups("", None, len(sizes), sum(seen) / len(seen), alike, by_chance)


def group_column(train: torch.Tensor, val: torch.Tensor) -> SharedGroups | None:
    """A column of a table whose values number subjects: rows of one are alike in the other columns. (N, F) each."""
    if train.dim() != 2 or train.shape[1:] != val.shape[1:] or not 4 <= train.shape[1] <= 200:
        return None
    for column in range(train.shape[1]):
        count = len(train[:, column].unique())
        if not GROUPS[1] <= count <= len(train) / IN_EACH:
            continue
        others = [c for c in range(train.shape[1]) if c != column]
        one, other = (Grouped(part[:, others], part[:, column].tolist(), None) for part in (train, val))
        known = shared_groups(one, other, least=GROUPS[1])
        if known is not None and known.alike > ALIKE_COLUMN:
            return dataclasses.replace(known, name=f"column {column}", column=column)
    return None


BATCHES = 4
"""Batches after which a unit that was zero for every sample counts as dead (a research tool's "over 3 batches")."""
FLAT = 0.01
"""Saturated: the slope is below a hundredth of its largest. For tanh that is beyond ±3.0, for a sigmoid beyond ±6.0."""
TIME_STEPS = 5
"""Shorter sequences are not followed through time."""
MOST = 2000
"""Calls of layers that are followed."""

RELUS = frozenset({"relu", "relu_", "relu6", "threshold", "hardtanh"})
SIGMOIDS = frozenset({"sigmoid", "sigmoid_"})
TANHS = frozenset({"tanh", "tanh_"})

Order = dict[str, tuple[str, int]]
"""Modules with parameters in the order of their calls: name → (type, calls in one forward)."""


# Activations


def activation_units(
    model: nn.Module, loss_fn: LossFn | None, batches: Sequence[Any]
) -> tuple[tuple[UnitsFact, ...], Order]:
    """Activations over some batches in train mode, and the order of the modules. Raises what the loss raises."""
    if loss_fn is None or not batches:
        return (), {}
    recorder = _ActivationRecorder(model)
    following = modules_followed(model, recorder.enter, recorder.leave)
    with following, preserve_rng(loss_fn), torch.no_grad(), mode(model, training=True), recorder:
        for recorder.batch, batch in enumerate(batches[:BATCHES]):
            loss_fn(model, batch)
    return tuple(place.fact() for place in recorder.places.values()), recorder.order


@dataclasses.dataclass
class _Activation:
    """One activation of the model. channels: its dimension of units; dead: which of them were always zero."""

    module: str
    op: str
    layer: str
    channels: int
    hidden: bool = False
    dead: torch.Tensor | None = None
    saturated: list[float] = dataclasses.field(default_factory=list)

    def fact(self) -> UnitsFact:
        units = 0 if self.dead is None else self.dead.numel()
        dead = None if self.dead is None else float(self.dead.float().mean())
        saturated = sum(self.saturated) / len(self.saturated) if self.saturated else None
        return UnitsFact(self.module, self.op, self.layer, self.hidden, units, dead, saturated)


class _ActivationRecorder(TorchFunctionMode):
    """Records activations by the module in which they run, and in which order modules with parameters are called."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {id(m): n for n, m in model.named_modules()}
        self.stack: list[str] = []
        self.places: dict[tuple[str, str, str], _Activation] = {}
        self.order: Order = {}
        self.last = ""
        self.batch = 0

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module), "")
        self.stack.append(name)
        if module._parameters:
            kind, calls = self.order.get(name, (type(module).__name__, 0))
            self.order[name] = kind, calls + (self.batch == 0)
            if not isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm)):
                self.last = name
                for place in self.places.values():
                    place.hidden = place.hidden or place.layer != name

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in RELUS | SIGMOIDS | TANHS and isinstance(out, torch.Tensor) and self.stack:
            self._note(name.rstrip("_"), out.detach())
        return out

    def _note(self, op: str, out: torch.Tensor) -> None:
        module = self.stack[-1]
        place = self.places.get((module, op, self.last))
        if place is None:
            channels = 1 if out.dim() > 3 or "Conv" in self.order.get(self.last, ("", 0))[0] else out.dim() - 1
            place = self.places[module, op, self.last] = _Activation(module, op, self.last, channels)
        if op in RELUS:
            zero = (out <= 0) if op != "hardtanh" else (out <= out.amin())
            others = [d for d in range(out.dim()) if d != place.channels]
            dead = zero.all(dim=others) if others else zero
            place.dead = dead if place.dead is None or place.dead.shape != dead.shape else place.dead & dead
        else:
            slope = (1 - out.square()) if op == "tanh" else 4 * out * (1 - out)
            place.saturated.append(float((slope < FLAT).float().mean()))


def is_linear(model: nn.Module, loss_fn: LossFn, batch: Any) -> bool:
    """Whether the output at the middle between two samples is the middle of their outputs, wherever these lie."""
    inputs: list[Any] = []
    with model.register_forward_pre_hook(lambda module, args: inputs.append(args)):
        loss_fn(model, batch)
    x = inputs[0][0] if len(inputs) == 1 and len(inputs[0]) == 1 else None
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or len(x) < 2:
        return False
    with torch.no_grad(), mode(model, training=False):
        one, other, middle = (model(part) for part in (x, x.roll(1, 0), (x + x.roll(1, 0)) / 2))
    if not isinstance(one, torch.Tensor) or not one.is_floating_point():
        return False
    return float((one + other - 2 * middle).abs().max()) < 1e-4 * float((one - other).abs().max())


# Gradients


def gradient_flow(
    model: nn.Module, loss_fn: LossFn, batch: Any
) -> tuple[tuple[LayerSignal, ...], tuple[TimeGradient, ...]]:
    """The calls of layers with weights, in order, and the gradients back through time. The gradients of parameters are
    left as they are. Raises what the loss raises, and RuntimeError where it has no gradient."""
    calls: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []
    sequences: list[tuple[str, list[torch.Tensor]]] = []
    leaves: list[torch.Tensor] = []  # inputs of recurrent modules with no trained parameter before them
    trained = [p for p in model.parameters() if p.requires_grad]
    with contextlib.ExitStack() as hooks, preserve_rng(loss_fn), torch.enable_grad():
        for name, module in model.named_modules():
            if any(p.dim() > 1 for p in module._parameters.values() if p is not None):
                follow = functools.partial(_follow, calls, name)
                hooks.enter_context(module.register_forward_hook(follow))
            if isinstance(module, nn.RNNBase):
                follow = functools.partial(_follow_in_time, sequences, leaves, name)
                hooks.enter_context(module.register_forward_pre_hook(follow))
        root = loss_root(loss_fn(model, batch))
        torch.autograd.grad(root, [*trained, *leaves], allow_unused=True)
    with_gradient = [(name, size, grads[0]) for name, size, grads in calls if grads]
    sizes = read_scalars([size.float() for _, size, _ in with_gradient])
    norms = read_scalars([norm.float() for _, _, norm in with_gradient])
    layer_calls = tuple(LayerSignal(name, size, norm) for (name, _, _), size, norm in zip(with_gradient, sizes, norms))
    in_time = [
        TimeGradient(n, len(norms[0]), float(norms[0][0]), float(norms[0][-1])) for n, norms in sequences if norms
    ]
    return layer_calls, (*in_time, *_handwritten_recurrences(layer_calls))


def _follow(calls: list[Any], name: str, module: nn.Module, args: Any, out: Any) -> None:
    """Record the size of a layer's output, and the norm of the gradient there when it comes."""
    outputs = [t for t in output_tensors(out) if t.is_floating_point() and t.requires_grad]
    if not outputs or len(calls) >= MOST:
        return
    out = outputs[0]
    grads: list[torch.Tensor] = []
    calls.append((name, torch.linalg.vector_norm(out.detach()) / max(out.numel(), 1) ** 0.5, grads))
    out.register_hook(lambda grad: grads.extend([] if grad is None else [torch.linalg.vector_norm(grad.detach())]))


def _follow_in_time(
    sequences: list[Any], leaves: list[torch.Tensor], name: str, module: nn.RNNBase, args: tuple[Any, ...]
) -> Any:
    """Record the norm of the gradient at each time step of a recurrent module's input when it comes."""
    x = args[0]
    if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[1 if module.batch_first else 0] < TIME_STEPS:
        return None
    if not x.requires_grad:
        x = x.clone().requires_grad_(True)
        leaves.append(x)
    norms: list[torch.Tensor] = []
    sequences.append((name, norms))
    others = (0, 2) if module.batch_first else (1, 2)
    x.register_hook(lambda grad: norms.append(torch.linalg.vector_norm(grad.detach(), dim=others)))
    return (x, *args[1:])


def _handwritten_recurrences(calls: tuple[LayerSignal, ...]) -> list[TimeGradient]:
    """Modules that are called many times in one pass: a recurrence that is written by hand."""
    by_module: dict[str, list[float]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call.gradient)
    return [
        TimeGradient(name, len(norms), norms[0], norms[-1])
        for name, norms in by_module.items()
        if len(norms) >= TIME_STEPS
    ]
