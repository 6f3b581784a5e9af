"""The batches of both loaders: which of their tensors are inputs and which are targets, and what can be said of them.

Around the model: settings of the environment that will cause trouble, how the loss scales with the batch, and what the
loader's workers draw.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import io
import itertools
import math
import operator
import os
import random
import re
import statistics
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from nbdebug.observe.tensors import fingerprint, output_tensors, tensors_in
from nbdebug.observe.variables import attributes
from nbdebug.text import count, listed
from nbdebug.tools.training import signals
from nbdebug.tools.training.evaluate import (
    LossFn,
    batch_size,
    batches_of,
    is_generator,
    preserve_rng,
    repeatable_loss,
    same_values,
    samples_of,
    save_rng,
    takes_fewer_rows,
)
from nbdebug.tools.training.one_step import Calls, StepGraph
from nbdebug.tools.training.signals import tensors_at, unmasked_tensors_at
from nbdebug.tools.training.static_facts import (
    AnswersAmongInputs,
    InputShift,
    Labels,
    LossCall,
    Overlap,
    SharedGroups,
    WorkerDraws,
    WrongCall,
)

CLASSES = 1000
"""More kinds of labels than this are no classes but numbers of things."""
READS = 16
"""Times that a sample is read: an image that is flipped in two ways comes out twice alike."""
READING = 1.0
"""Seconds for that."""
FEW, BY_CHANCE, UNSEEN = 5, 1e-6, 0.02
"""Validation samples of a label that training never has; how rarely a draw leaves it out; their share of all."""
ENDS_ALIKE = 0.9
"""Share of the sequences that end in the same token."""
ENDS = 32
"""Samples at either end of a dataset that tell whether it drifts."""
LEAST_ITEMS, OTHER_LOSS = 16, 1e-4
"""Samples that are collated anew, and the relative change of their loss that rounding does not make."""
MEASURED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
LEAST_TURN, TENTHS, NEIGHBOURS, TURN, OTHER_END = 200, 10, 5, 3, 0.25
"""Samples of which a target is cut into tenths; the nearest neighbours of each in other tenths; tenths that are far
apart, around a circle, too; and the share of neighbours in the last tenth that samples of the first one have, and the
reverse (on a circle a half, by chance a ninth)."""
SUBJECTS = re.compile(
    r"(^|_)(subj|subject|patient|participant|person|individual|speaker|donor|animal|mouse|writer|group|session|recording"
    r"|video|scene|study|family)s?(_?(ids?|idx|index|names?|numbers?|labels?|of.*))?$",
    re.IGNORECASE,
)
"""Names of that which samples have in common."""
AHEAD, TEXTS, PAIRS, TELLS = 0.95, 64, 400, 6.0
"""Share of the targets that are the token one step on; batches of text that are read; pairs of tokens, and standard
errors, from which one tells another."""
MOST_COMPARED = 1500
"""Samples of each side whose nearest are looked for."""
MOST, SECONDS = 400, 5.0
"""Batches of a loader, and time, that are read."""


def _told(tables: Sequence[torch.Tensor]) -> float:
    """How often the token before it, in its column, tells a token; less what chance alone may do. tables: (T, N)."""
    pairs = [pair for t in tables for pair in zip(t[:-1].flatten().tolist(), t[1:].flatten().tolist())]
    half, after = len(pairs) // 2, dict[int, Counter[int]]()
    if half < PAIRS:
        return 0.0
    for a, b in pairs[:half]:
        after.setdefault(a, Counter())[b] += 1
    best = {a: known.most_common(1)[0][0] for a, known in after.items()}
    share = statistics.fmean(best.get(a) == b for a, b in pairs[half:])
    return max(0.0, share - TELLS * (share * (1 - share) / half) ** 0.5)


@dataclasses.dataclass
class Batches:
    """The first batches. loss: the call that takes the targets; target, inputs: positions in a batch's tensors;
    targets: those of all losses; all are known once a step has run (`find_roles`)."""

    train: list[Any]
    val: list[Any]
    loader: Any
    val_loader: Any
    loss: LossCall | None = None
    target: int | None = None
    inputs: list[int] = dataclasses.field(default_factory=list)
    targets: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, loader: Any, val_loader: Any) -> Batches:
        """The first batches of both, with all random numbers put back. A DataLoader is read through a shallow copy, so
        that workers that outlive a pass are not left behind in the user's own."""
        own, other = (copy.copy(one) if isinstance(one, DataLoader) else one for one in (loader, val_loader))
        return cls(batches_of(own, MOST, SECONDS), batches_of(other, MOST, SECONDS), loader, val_loader)

    @property
    def samples(self) -> int | None:
        return samples_of(self.loader)

    def _rows_are_one(self) -> bool:
        """Whether in every batch all rows of all inputs are the same, and not the same as in another, though labels
        differ."""
        rows = [[x for x in tensors_at(b, self.inputs) if x.dim() > 1 and len(x) >= FEW] for b in self.train[:READS]]
        targets = [t for b in self.train[:READS] for t in tensors_at(b, [self.target or 0])]
        if len(rows) < 2 or not all(rows) or not all(bool((x == x[:1]).all()) for row in rows for x in row):
            return False
        differ = any(not torch.equal(a[0], b[0]) for one, other in itertools.pairwise(rows) for a, b in zip(one, other))
        return differ and all(t.dim() > 0 and bool((t != t[:1]).any()) for t in targets)

    def drawn(self) -> tuple[int, int] | None:
        """(weights of the sampler, samples of the dataset), where there are fewer: the others are never drawn."""
        sampler, samples = getattr(self.loader, "sampler", None), self.samples
        weights = len(sampler.weights) if isinstance(sampler, WeightedRandomSampler) else None
        return None if weights is None or samples is None or weights >= samples else (weights, samples)

    def reread(self) -> str:
        """What reading a sample again shows: "written" where that changes what the dataset holds, "apart" where the
        same inputs come with a target's same values in other places, or with another label, "shared" where all rows of
        a batch are the same tensor; "resized" where masks hold averages of class numbers; "" for none of these."""
        masks = [t for b in self.train[:READS] for t in tensors_at(b, [-1 if self.target is None else self.target])]
        if masks and all(t.dim() == 3 and not t.is_floating_point() for t in masks) and signals.interpolated(masks):
            return "resized"
        dataset: Any = getattr(self.loader, "dataset", None)
        order = [i for i in (*self.inputs, self.target) if i is not None]
        readable = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        if not readable or self.target is None or not self.inputs:
            return ""
        if self._rows_are_one():
            return "shared"

        def read() -> list[torch.Tensor]:
            row = [torch.as_tensor(v) for v in tree_leaves(dataset[0]) if hasattr(v, "__array__") or isinstance(v, int)]
            return [row[i] for i in order] if len(row) == len(output_tensors(self.train[0])) else []

        seen, first, until = list[list[torch.Tensor]](), list[torch.Tensor](), time.monotonic() + READING
        with preserve_rng(self.loader):
            while len(seen) < READS and (len(seen) < 2 or time.monotonic() < until):
                seen.append(read())
                if not all(seen):
                    return ""
                first = first or [t.clone() for t in seen[0]]
                if not all(map(torch.equal, seen[0], first)):  # a later reading has changed what an earlier one gave
                    return "written" if any(self._piles_up(read, seen[0], first) for _ in range(FEW)) else ""
        for one, other in itertools.combinations(seen, 2):
            *alike, same = (torch.equal(a, b) for a, b in zip(one, other))
            values = [row[-1].flatten().sort().values for row in (one, other)]
            if all(alike) and not same and (one[-1].dim() == 0 or torch.equal(*values)):
                return "apart"
        return ""

    def _piles_up(
        self, read: Callable[[], list[torch.Tensor]], held: list[torch.Tensor], first: list[torch.Tensor]
    ) -> bool:
        """Whether a sample, read with the same random numbers, depends on what an earlier reading has left in `held`;
        one buffer for all samples is filled anew. `first` is put back."""
        results = list[list[torch.Tensor]]()
        read()
        numbers = save_rng(self.loader)
        for _ in range(3):
            numbers()
            results.append([t.clone() for t in read()])
            _put_back(held, first)
        left, anew, again = results
        return all(map(torch.equal, anew, again)) and not all(map(torch.equal, left, anew))

    def padding(self) -> float:
        """Of sequences of tokens of which nearly all end in the same one, the share of the places that this fills."""
        x = next(
            (t for t in tensors_at(self.train[0], self.inputs) if t.dim() == 2 and not t.is_floating_point()), None
        )
        if x is None or x.shape[1] < 2:
            return 0.0
        own = x == x[:, -1].mode().values
        return (
            float(own.flip(1).long().cumprod(1).float().mean())
            if float(own[:, -1].float().mean()) > ENDS_ALIKE
            else 0.0
        )

    def columns_of_text(self) -> tuple[float, float, float] | None:
        """Where batches are (steps, columns) of tokens, and the targets the same one step on: how often a token is told
        by the one before it in its column, how often by the one beside it in its row, and by no other. Told is the
        commonest successor in the first half of all pairs, judged on the second."""
        columns = list[torch.Tensor]()
        for batch in self.train[:TEXTS]:
            tokens = [t for t in output_tensors(batch) if t.dim() == 2 and min(t.shape) > 2]
            tokens = [t.cpu() for t in tokens if not t.is_floating_point()]
            for x, y in itertools.permutations(tokens, 2):
                if x.shape != y.shape or float((x[1:] == y[:-1]).float().mean()) < AHEAD:
                    continue
                if float((x[:, 1:] == y[:, :-1]).float().mean()) < AHEAD:
                    columns.append(x)
                    break
            else:
                return None
        if not columns:
            return None
        along, across = ([t if turn else t.T for t in columns] for turn in (True, False))
        ends = torch.cat([t.flatten() for t in columns])
        return _told(along), _told(across), float((ends == ends.mode().values).double().mean())

    def silent_end(self) -> tuple[int, int] | None:
        """Of sequences whose targets are their own tokens: (the token that ends each and fills the shorter ones up, and
        is a target of none; how many there are). What is filling is told by a mask in the batch; without one, the
        longest of a batch needs none."""
        ends, sequences, filled = set[int](), 0, set[int]()
        if self.loss is None or self.target is None:
            return None
        for batch in self.train:
            tokens = [t for t in tensors_at(batch, [*self.inputs, self.target]) if t.dim() == 2]
            if len({t.shape for t in tokens}) != 1 or any(t.is_floating_point() for t in tokens):
                return None
            y, x = tokens[-1], next((t for t in tokens[:-1] if len(t.unique()) > 2), None)
            if x is None:
                return None
            flags = (t for t in output_tensors(batch) if t.shape == x.shape and bool(((t == 0) | (t == 1)).all()))
            mask, counted = next(flags, None), (y >= 0) & (y != self.loss.ignore_index)
            if mask is None:
                runs = (x == x[:, -1].mode().values).flip(1).long().cumprod(1).sum(1)
                if int(runs.min()) != 1:
                    return None
                mask = torch.arange(x.shape[1], device=x.device) <= x.shape[1] - runs[:, None]
            last = (mask * torch.arange(1, x.shape[1] + 1, device=x.device)).amax(1, keepdim=True) - 1
            ends |= set(x.gather(1, last.clamp_min(0)).flatten().tolist())
            filled |= set(x[mask == 0].tolist())
            nexts = counted[:, :-1]
            same = torch.equal(x[counted], y[counted]) or torch.equal(x[:, 1:][nexts], y[:, :-1][nexts])
            if not same or not bool(counted.any()) or len(ends) > 1 or bool((y[counted] == min(ends)).any()):
                return None
            sequences += len(x)
        return (ends.pop(), sequences) if filled == ends and sequences >= ENDS else None

    def left_out(self, loss: Callable[[Any], float]) -> tuple[str, float, float] | None:
        """A part of the samples that what collates them leaves out, though the loss of a batch is another with it: its
        name, and both losses. Of samples and batches that name their parts."""
        dataset: Any = getattr(self.loader, "dataset", None)
        collate = getattr(self.loader, "collate_fn", None)
        known = dataset_and_indices(self.loader)
        if collate is None or not isinstance(self.train[0], Mapping) or known is None:
            return None
        with preserve_rng(self.loader), contextlib.redirect_stdout(io.StringIO()):
            items = [dataset[i] for i in known[1][:LEAST_ITEMS]]
            missing = set(items[0]) - set(self.train[0]) if isinstance(items[0], Mapping) else set()
            batch = collate([dict(item) for item in items]) if missing else {}
        for name in sorted(missing):
            values = [item[name] for item in items]
            if all(isinstance(v, (int, float, torch.Tensor)) or hasattr(v, "__array__") for v in values):
                column = torch.stack([torch.as_tensor(v) for v in values])
                without, given = loss(batch), loss({**batch, name: column})
                if abs(given - without) > OTHER_LOSS * abs(without):
                    return name, without, given
        return None

    def wrapping(self) -> tuple[float, float, float] | None:
        """Of a target that is one number and is learned as it is: (its lowest, its highest, the share of neighbours at
        the other end), where inputs with the highest targets are most like those with the lowest, and the reverse, as
        an angle's are; and no others are alike that are far apart, as where a sign can't be told."""
        call = self.loss
        if call is None or call.op not in MEASURED or self.target is None or len(self.inputs) != 1:
            return None
        rows = [tensors_at(batch, [*self.inputs, self.target]) for batch in self.train]
        if any(not x.is_floating_point() or x.dim() < 2 or y.numel() != len(x) for x, y in rows):
            return None
        x, y = torch.cat([x.flatten(1) for x, _ in rows]).float().cpu(), torch.cat([y.flatten() for _, y in rows]).cpu()
        x, y = x[:MOST_COMPARED], y[:MOST_COMPARED].float()
        first = rows[0][1].float()
        raw = math.isclose(float(first.min()), call.target_low or 0.0, rel_tol=1e-4, abs_tol=1e-6)
        if not raw or len(y) < LEAST_TURN or len(y.unique()) < len(y) / 2:
            return None
        place = y.argsort().argsort() * TENTHS // len(y)  # 0 to 9
        far = torch.cdist(x, x).masked_fill(place[:, None] == place, math.inf)
        near = place[far.topk(NEIGHBOURS, largest=False).indices]

        def shares(one: int, other: int) -> float:
            return float((near[place == one] == other).float().mean())

        ends = min(shares(0, TENTHS - 1), shares(TENTHS - 1, 0))
        apart = max(shares(a, b) for a in range(TENTHS) for b in range(TENTHS) if TURN <= abs(a - b) <= TENTHS - TURN)
        return (float(y.min()), float(y.max()), ends) if ends > max(2 * apart, OTHER_END) else None

    def find_roles(self, step: StepGraph, loss_calls: Sequence[LossCall]) -> None:
        """Which tensors are targets and inputs, by their use in the step."""
        self.loss = next((c for c in loss_calls if c.target is not None), loss_calls[0] if loss_calls else None)
        self.target = None if self.loss is None else self.loss.target
        self.targets = [c.target for c in loss_calls if c.target is not None]
        self.inputs = signals.input_leaves(step, [c.target for c in loss_calls], output_tensors(self.train[0]))

    def labels(self) -> Labels | None:
        """Counts and order of the labels; None where the targets are no labels of samples."""
        known = self._labels_of(self.train)
        if not known:
            return None
        flat = [label for row in known for label in row]
        counts = Counter(flat)
        if not 0 < len(counts) <= CLASSES:
            return None
        total = len(flat)
        return Labels(
            {str(label): times for label, times in sorted(counts.items())},
            total,
            1 + sum(a != b for a, b in itertools.pairwise(flat)),
            1 + (total - 1) * (1 - sum((times / total) ** 2 for times in counts.values())),
            statistics.median(len(set(row)) for row in known),
            len(known),
            self._is_whole_pass(len(known)),
            isinstance(getattr(self.loader, "sampler", None), SequentialSampler),
            self._unseen(counts, total) if self._is_whole_pass(len(known)) and self.drawn() is None else {},
        )

    def _labels_of(self, batches: list[Any]) -> list[list[int]]:
        """By batch; none where the targets are no labels."""
        targets = [] if self.target is None else [t for b in batches for t in tensors_at(b, [self.target])]
        rows = [_classes(t, self.loss) for t in targets]
        return [] if any(row is None for row in rows) else [row.tolist() for row in rows if row is not None]

    def _unseen(self, counts: Counter[int], total: int) -> dict[str, int]:
        """Labels of validation that a draw of so many samples would hardly have left out."""
        val = Counter(label for row in self._labels_of(self.val) for label in row)
        rare = ((label, times) for label, times in sorted(val.items()) if label not in counts and times >= FEW)
        left = {str(label): times for label, times in rare if (1 - times / val.total()) ** total < BY_CHANCE}
        return left if sum(left.values()) >= UNSEEN * val.total() else {}

    def _is_whole_pass(self, batches: int) -> bool:
        try:
            return batches >= len(self.loader)
        except TypeError:  # an iterable dataset has no length
            return False

    def input_shift(self) -> InputShift | None:
        """Of the first floating input (or bytes) that both loaders give."""
        for leaf in self.inputs if self.drawn() is None else ():
            train, val = ([t for b in batches for t in tensors_at(b, [leaf])] for batches in (self.train, self.val))
            known = train and val and all(t.dtype == torch.uint8 or t.is_floating_point() for t in (train[0], val[0]))
            if known and (shift := signals.input_shift(train, val)) is not None:
                return dataclasses.replace(shift, drift=self._drift(leaf))
        return None

    def _drift(self, leaf: int) -> float:
        """From the first to the last samples of the training set, in its own order, or else in the order read."""
        try:
            data, collate = self.loader.dataset, self.loader.collate_fn
            ends = (range(ENDS), range(len(data) - ENDS, len(data)))
            with preserve_rng(data):
                first, last = (tensors_at(collate([data[i] for i in end]), [leaf])[0] for end in ends)
            return signals.drift(first, last)
        except Exception:  # the border: streams have no order of their own, lists of batches no dataset
            first, last = (tensors_at(self.train[i], [leaf])[0] for i in (0, -1))
            return signals.drift(first, last) if len(first) > 1 and len(last) > 1 else 0.0

    def overlap(self) -> Overlap | None:
        if not self.inputs:
            return None
        target = [] if self.target is None else [self.target]
        train = [
            (
                unmasked_tensors_at(batch, self.inputs, self.target),
                next(iter(unmasked_tensors_at(batch, target, self.target)), None),
            )
            for batch in self.train
        ]
        val = [unmasked_tensors_at(batch, self.inputs, self.target) for batch in self.val]
        dataset = getattr(self.loader, "dataset", self)
        same = self.val_loader is not None and getattr(self.val_loader, "dataset", None) is dataset
        exact = signals.overlap(train, val, same)
        tables = [[rows[0] for rows in part if rows] for part in ([inputs for inputs, _ in train], val)]
        if exact is None or not all(tables) or len({t.shape[1:] for part in tables for t in part}) > 1:
            return exact
        near, by_chance = signals.near_copies(*(torch.cat(part) for part in tables))
        return dataclasses.replace(exact, near=near, near_by_chance=by_chance)

    def answers_among_inputs(self) -> AnswersAmongInputs | None:
        """Columns, tokens or numbers of the first input that give the label, or a quantity of a table, away."""
        known, val = self._inputs_and_targets(self.train), self._inputs_and_targets(self.val)
        if known is None:
            return None
        x, target = known
        if x.dim() == 2 == target.dim() and target.shape[1] > 1:
            columns = signals.copied_columns(x, target)
            return AnswersAmongInputs("copied", columns) if columns else None
        labels = _classes(target, self.loss)
        if labels is None:
            x = x.squeeze(-1)  # of a series that holds one quantity
            if x.dim() > 2 and (same := signals.same_numbers(x, target)):
                return AnswersAmongInputs("copied", same)
            columns = signals.target_columns(x, target.flatten()) if x.dim() == 2 and target.numel() == len(x) else {}
            return AnswersAmongInputs("target", columns) if columns else None
        recoded, columns = signals.label_columns(x, labels)
        if columns:
            return AnswersAmongInputs("label" if recoded else "nearly", columns)
        answers = None if val is None or val[0].shape[1:] != x.shape[1:] else _classes(val[1], self.loss)
        feature = signals.telling_feature(x, labels, None if val is None or answers is None else (val[0], answers))
        return AnswersAmongInputs("one", {}, feature) if feature is not None else None

    def _inputs_and_targets(self, batches: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The first input and the target of all samples; None where they are no rows side by side."""
        if self.target is None or not self.inputs:
            return None
        pairs = [(tensors_at(b, self.inputs[:1]), tensors_at(b, [self.target])) for b in batches]
        rows = [(x[0], t[0]) for x, t in pairs if x and t]
        if any(x.dim() < 2 or not t.dim() or len(x) != len(t) for x, t in rows):
            return None
        alike = len({(x.shape[1:], t.shape[1:]) for x, t in rows}) == 1
        return (torch.cat([x for x, _ in rows]), torch.cat([t for _, t in rows])) if alike else None

    # -- subjects

    def groups(self, loss_fn: Any) -> SharedGroups | None:
        """What groups samples (a key beside inputs and targets, a list that the dataset holds, a column), where a group
        has samples on both sides and these are alike."""
        if not self.inputs or not self.val:
            return None
        for name, train, val in (*self._keys_of_batches(loss_fn), *self._keys_of_datasets()):
            known = signals.shared_groups(train, val)
            if known is not None:
                return dataclasses.replace(known, name=name)
        train, val = ([r for r in map(self._row, part) if r is not None] for part in (self.train, self.val))
        return signals.group_column(*(torch.cat(p)[:MOST_COMPARED] for p in (train, val))) if train and val else None

    def _row(self, batch: Any) -> torch.Tensor | None:
        """The first input of each sample as a row of numbers."""
        known = tensors_at(batch, self.inputs[:1])
        floating = bool(known) and known[0].is_floating_point() and known[0].dim() > 1
        return known[0].detach().cpu().float().flatten(1) if floating else None

    def _keys_of_batches(self, loss_fn: Any) -> Iterator[tuple[str, Any, Any]]:
        first = self.train[0]
        roles = {id(t) for t in tensors_at(first, [*self.inputs, *self.targets])}  # what any loss learns is a label
        items: Any = first.items() if isinstance(first, Mapping) else ()
        items = enumerate(first) if isinstance(first, (tuple, list)) else items
        others = [key for key, value in items if id(value) not in roles and _keys(value) is not None]
        code = getattr(loss_fn, "__code__", None)
        names = [n for n in (*code.co_varnames, *code.co_names) if SUBJECTS.search(n)] if code is not None else []
        for key in others:
            named, name = isinstance(key, str), str(key)
            if named and not SUBJECTS.search(name):
                continue
            if not named:
                name = names[0] if len(others) == len(set(names)) == 1 else f"batch[{key}]"
            train, val = (self._grouped([(b, _keys(b[key])) for b in part]) for part in (self.train, self.val))
            if train is None or val is None:
                continue
            # a finer label looks like a group whose samples all have one label, as does the label that no loss uses
            if named or not name.startswith("batch") or (train.targets is not None and train.is_mixed()):
                yield name, train, val

    def _grouped(self, keyed: Sequence[tuple[Any, list[Any] | None]]) -> signals.Grouped | None:
        """Batches, each with a key for each sample."""
        rows = []
        for batch, keys in keyed:
            x, target = self._row(batch), tensors_at(batch, [] if self.target is None else [self.target])
            if x is not None and keys is not None and len(x) == len(keys):
                rows.append((x, keys, target[0] if target else None))
        return signals.Grouped.of(rows, MOST_COMPARED)

    def _keys_of_datasets(self) -> Iterator[tuple[str, Any, Any]]:
        sides = [s for s in map(dataset_and_indices, (self.loader, self.val_loader)) if s is not None]
        members = getattr(sides[0][0], "__dict__", {}) if len(sides) == 2 else {}
        for name in [n for n, v in members.items() if SUBJECTS.search(n) and _keys(v) is not None]:
            both = []
            for (data, indices), loader in zip(sides, (self.loader, self.val_loader)):
                keys = _keys(getattr(data, name, None))
                if keys is None or len(keys) != len(data):
                    break
                some = indices[:: max(1, len(indices) // MOST_COMPARED)][:MOST_COMPARED]
                with preserve_rng(data):
                    batch = loader.collate_fn([data[i] for i in some])
                both.append(self._grouped([(batch, [keys[i] for i in some])]))
            if len(both) == 2 and both[0] is not None and both[1] is not None:
                yield name, *both


def other_partners(calls: Calls, batch: Any) -> Iterator[WrongCall]:
    """Scores of a batch's rows among themselves, of which each is to find the other view of its own sample, where the
    place that the targets tell is that of a view of another one. Rows are known by what the batch holds."""
    parts = [t for t in output_tensors(batch) if t.dim() > 1 and len(t) > 1]
    for call in calls.calls:
        scores, target = call.argument(0, "input"), call.argument(1, "target")
        if call.op != "cross_entropy" or scores.dim() != 2 or target.shape != scores.shape[:1]:
            continue
        places = torch.arange(len(target), device=target.device)
        rows = next((x for x in calls.entered if len(x) == len(target) and x.dim() > 1), None)
        if rows is None or not torch.equal(target.sort().values, places) or bool((target == places).any()):
            continue
        own, made = _samples_of_rows(rows, parts), calls.dependence(rows).maker
        partners = [own[place] for place in target.tolist()] if own else []
        if own and sum(map(operator.ne, own, partners)) > ENDS_ALIKE * len(own):
            name, where = ("", call.where) if made is None else (made.op, made.where)
            yield WrongCall("other partners", call.op, where, (name, own[0], int(target[0]), partners[0]))


def _samples_of_rows(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[int]:
    """Of which sample each row is: a row of one of these, or of their second dimension; [] where that is not sure."""
    found = dict[Any, int]()
    for part in parts:
        views = (
            part.unbind(1) if part.shape[2:] == rows.shape[1:] else [part] if part.shape[1:] == rows.shape[1:] else []
        )
        for view in views:
            for sample, row in enumerate(view.detach().cpu()):
                if found.setdefault(fingerprint(row), sample) != sample:
                    return []
    own = [found.get(fingerprint(row), -1) for row in rows.detach().cpu()]
    return own if min(own) >= 0 else []


def _keys(value: Any) -> list[Any] | None:
    """One whole number or text for each sample; None for anything else."""
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        values = value.tolist() if getattr(value, "ndim", 0) == 1 else []
    else:
        values = list(value) if isinstance(value, (list, tuple)) else []
    return values if values and all(isinstance(v, (str, int)) and not isinstance(v, bool) for v in values) else None


def dataset_and_indices(loader: Any) -> tuple[Any, list[int]] | None:
    """The dataset below a split, and the places in it."""
    data = getattr(loader, "dataset", None)
    with contextlib.suppress(TypeError):
        indices = list(range(len(data)))  # type: ignore[arg-type]
        while isinstance(data, Subset):
            indices, data = [data.indices[i] for i in indices], data.dataset
        return data, indices
    return None


def _classes(target: torch.Tensor, loss: LossCall | None) -> torch.Tensor | None:
    """Labels as a row of whole numbers, where there is one for each sample; None for tokens, pixels and quantities."""
    if target.dim() == 2 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.dim() != 1:
        return None
    if not target.is_floating_point():
        return target if loss is not None and loss.op in ("cross_entropy", "nll_loss") else None
    binary = loss is not None and loss.op.startswith("binary") and bool(((target == 0) | (target == 1)).all())
    return target.long() if binary else None


# -- settings around the model -----------------------------------------------------------------------------------------


CLOSE = 0.02
"""Relative difference below which two ways to compute a loss count as the same."""
DRAWS = 3
"""Times that each worker reads the item."""
PATIENCE = 20.0
"""Seconds for one pass of the probe; items that take longer are not worth it."""


def drawn_validation(val_loader: Any) -> Iterator[str]:
    """That validation items are drawn anew each time they are read, as a training set's augmentation does. A note: some
    tasks (denoising, masked words) draw on purpose."""
    data: Any = getattr(val_loader, "dataset", None)
    if isinstance(data, IterableDataset) or not {"__getitem__", "__len__"} <= set(dir(type(data))) or not len(data):
        return
    with preserve_rng(val_loader):
        reads = [[fingerprint(t) for t in tensors_in(data[0])] for _ in range(3)]
    if any(read != reads[0] for read in reads):
        yield (
            "Validation items are random: the same item comes out otherwise each time. Where a transform augments it, "
            "give validation one of its own, without: its loss then has less noise, and is that of the plain data."
        )


def environment_notes(model: nn.Module, loader: Any, loss_fn: Any) -> Iterator[str]:
    """Sentences about the environment, each with what to do."""
    workers = getattr(loader, "num_workers", 0)
    if workers and "tokenizers" in sys.modules and "TOKENIZERS_PARALLELISM" not in os.environ:
        yield (
            "The loader forks workers and tokenizers is loaded: it will warn, and run without threads. Set "
            "os.environ['TOKENIZERS_PARALLELISM'] = 'false' before the import."
        )
    if getattr(loader, "pin_memory", False) and torch.backends.mps.is_available():
        yield "pin_memory=True does nothing on MPS; leave it out."
    if workers and sys.platform in ("darwin", "win32") and "ipykernel" in sys.modules:
        yield "Workers are spawned on this system: define the dataset's class in a file, not in a cell."
    try:
        source = inspect.getsource(loss_fn)
    except (OSError, TypeError):
        source = ""
    if "torch.cuda.amp." in source or "cuda.amp.autocast" in source:
        yield "torch.cuda.amp is deprecated; write torch.amp.autocast('cuda') and torch.amp.GradScaler('cuda')."
    moving = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        and m.training
        and m.track_running_stats
        and (own := list(m.parameters(recurse=False)))
        and not any(p.requires_grad for p in own)
    ]
    if moving:
        yield (
            f"{count(len(moving), 'frozen batch normalization')} ({listed(moving)}) "
            f"{'is' if len(moving) == 1 else 'are'} in train mode: the running statistics will change although the "
            "weights do not. To keep them, call .eval() on them after model.train()."
        )


def loss_reduction(model: nn.Module, loss_fn: LossFn, batch: Any) -> str:
    """Two half batches against the whole one: "mean", "sum" or "neither"; "" where it can't be told."""
    n = batch_size(batch)
    if n is None or n < 4 or n % 2:
        return ""

    def half(start: int) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t[start : start + n // 2] if t.dim() else t, batch)

    try:
        if not takes_fewer_rows(model, loss_fn, batch, n):
            return ""
        whole, first, second = (repeatable_loss(model, loss_fn, part) for part in (batch, half(0), half(n // 2)))
    except Exception:  # a batch that can't be halved: the nodes of one graph, a size that is written in
        return ""
    if abs(whole - (first + second) / 2) <= CLOSE * abs(whole):
        return "mean"
    return "sum" if abs(whole - first - second) <= CLOSE * abs(whole) else "neither"


class _WorkerItems(Dataset):
    """A dataset whose every item is (worker, fingerprint of the user's item 0)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, str]:
        info: Any = torch.utils.data.get_worker_info()
        return (0 if info is None else info.id), _fingerprint(self.dataset[0])


def _fingerprint(item: Any) -> str:
    """A hash of an item's tensors, arrays and numbers."""
    digest = hashlib.blake2b(digest_size=12)
    for tensor in output_tensors(item):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    parts = item if isinstance(item, (tuple, list)) else item.values() if isinstance(item, dict) else [item]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            digest.update(part.tobytes() if hasattr(part, "tobytes") else repr(part).encode())
    return digest.hexdigest()


def copies_of_one(batches: Sequence[Any]) -> int:
    """The rows of a batch, where all of these are the same one; else 0."""
    first, *others = map(tensors_in, batches or [[]])
    alike = bool(others) and all(same_values(first, other) for other in others)
    return len(first[0]) if alike and first[0].dim() else 0


def first_row(rows: Any) -> Any:
    """The collate function of the probe; spawned workers need it by name."""
    return rows[0]


def worker_draws(loader: Any, patience: float = PATIENCE) -> tuple[WorkerDraws | None, str]:
    """(what the workers draw, "") or (None, why it could not be checked, or ""). patience: seconds for one of the two
    passes."""
    patience = min(patience, PATIENCE)
    workers = getattr(loader, "num_workers", 0)
    if not isinstance(loader, DataLoader) or not workers:
        return None, ""
    if isinstance(loader.dataset, IterableDataset):
        return None, "Whether workers draw the same random numbers: the dataset is an iterable one"
    used = min(2, workers)
    try:
        probe = DataLoader(
            _WorkerItems(loader.dataset),
            batch_size=1,
            sampler=list(range(used * DRAWS)),
            num_workers=used,
            collate_fn=first_row,
            worker_init_fn=loader.worker_init_fn,
            timeout=patience,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
            generator=torch.Generator().manual_seed(random.SystemRandom().randrange(2**31)),
        )
        passes = [_draws_by_worker(probe, patience) for _ in range(2)]
    except Exception as error:  # the border: this probe is ours, whatever the user's dataset makes of it
        return None, f"Whether workers draw the same random numbers: {type(error).__name__}: {str(error)[:120]}"
    draws = list(passes[0].values())
    varies = all(len(set(row)) > 1 for row in draws)
    alike = used > 1 and len(draws) > 1 and all(row == draws[0] for row in draws)
    repeats = varies and passes[0] == passes[1]
    return WorkerDraws(workers, varies, varies and alike, repeats, _generator_of(loader.dataset)), ""


def _draws_by_worker(probe: DataLoader, patience: float) -> dict[int, list[str]]:
    draws: dict[int, list[str]] = {}
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # Python's, about fork beside threads
        for worker, fingerprint in probe:
            draws.setdefault(worker, []).append(fingerprint)
            if time.monotonic() - began > patience:
                raise TimeoutError(f"its items take too long ({patience:g} s)")
    return dict(sorted(draws.items()))


def _generator_of(dataset: Any) -> str:
    """The attribute of the dataset (or of its transform) that holds a generator of random numbers."""
    level, depth = [("", dataset)], 0
    while level and depth < 4:
        below = []
        for path, owner in level:
            for key, value in attributes(owner).items():
                if is_generator(value):
                    return f"{path}{key}"
                if not issubclass(type(value), (torch.nn.Module, type, types.ModuleType)):
                    below.append((f"{path}{key}.", value))
        level, depth = below, depth + 1
    return ""


def _put_back(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)
