"""The register of births: every place where an inf or a NaN came into being,
with what can be told of it there and then."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.observe.ops import Schema
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import StorageInfo, dense, finite, folds_of, rows_of

EMPTIES = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Ops that hand out memory as it is: what is bad in it was born there."""
_FILLS = frozenset(
    {"fill", "masked_fill", "full", "full_like", "new_full", "scalar_tensor", "constant_pad_nd", "lift_fresh"}
)
_LOGS = frozenset({"log", "log2", "log10"})
_MOST = 512
"""A step with more births than this that nobody intended has gone bad everywhere; the first ones tell why."""


class Origin:
    """A birth, as the books keep it. op is None for a tensor that came bad from outside: then memory tells of it, and
    readers are the ops that used it. folded: its rows, if its one dimension is batch and time folded, and
    nothing later shows the rows better. trail: (op, rows) wherever it then showed. segment: how many backwards had run
    before, in this step. factors: ranges (low, high) of the parameter-free factors that it was multiplied by.
    after_model: born after the model had returned."""

    __slots__ = (
        "absorbed_by",
        "after_model",
        "bad",
        "custom",
        "dtype",
        "factors",
        "folded",
        "index",
        "intended",
        "made",
        "memory",
        "numbers",
        "op",
        "parents",
        "readers",
        "rows",
        "segment",
        "shape",
        "step",
        "trail",
        "whole",
    )

    def __init__(self, op: Op | None, made: str, step: int):
        self.index, self.op, self.made, self.step = -1, op, made, step
        self.bad = 0
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.parents: set[int] = set()
        self.rows: tuple[int, ...] | None = None
        self.folded: tuple[int, ...] | None = None
        self.memory: StorageInfo | None = None
        self.readers: list[Op] = []
        self.trail: list[tuple[int, tuple[int, ...]]] = []
        self.segment = 0
        self.intended = self.whole = self.custom = self.after_model = False
        self.absorbed_by: set[str] = set()
        self.factors: list[tuple[float, float]] = []
        self.numbers: Any = None


class Origins:
    """All births that still count, oldest first, by number. batch, folds: what the model was given, to tell batch
    rows by (set by the probe). segment: how many backwards have run in this step."""

    def __init__(self, recorder: Recorder, take_scene: Any):
        self.recorder, self.take_scene = recorder, take_scene
        self.records: dict[int, Origin] = {}
        self._next = 0
        self.begin_step(set())

    def begin_step(self, alive: set[int]) -> None:
        """Forget what only one step needs, and the births that no memory holds any more (`alive`: held ones)."""
        alive = self.ancestors(alive)
        self.records = {n: record for n, record in self.records.items() if n in alive}
        self.take_scene.taken = 0
        self._unintended: list[int] = []
        self.batch: int | None = None
        self.folds: set[int] = set()
        self.leading: collections.Counter[int] = collections.Counter()
        self.segment = 0

    def __getitem__(self, index: int) -> Origin:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Origin]:
        return iter(self.records.values())

    def add(self, record: Origin) -> int:
        """Enter a record under the next number."""
        record.index, self._next = self._next, self._next + 1
        self.records[record.index] = record
        if not record.intended:
            self._unintended.append(record.index)
        return record.index

    @property
    def batch_size(self) -> int | None:
        """What the model was given, or, with no model, the commonest first dimension of what came from outside."""
        if self.batch is None and self.leading:
            return self.leading.most_common(1)[0][0]
        return self.batch

    def ancestors(self, births: set[int]) -> set[int]:
        """These births and all that they were made of."""
        found, todo = set(), list(births)
        while todo:
            birth = todo.pop()
            if birth in self.records and birth not in found:
                found.add(birth)
                todo.extend(self.records[birth].parents)
        return found

    def born(self, scene: tuple, mask: torch.Tensor, nan: torch.Tensor) -> dict[int, torch.Tensor]:
        """A birth from sound operands. An infinity written as a number (`x * -inf`) is a mask's where it stays one, and
        a fault where it makes a NaN: two births."""
        op, _, args, kwargs = scene[:4]
        infinite = any(isinstance(a, float) and math.isinf(a) for a in (*args, *kwargs.values()))
        parts = [mask & ~nan, mask & nan] if infinite else [mask]
        return {self.enter(scene, part, nan, self.of_forward(op), {}): part for part in parts if bool(part.any())}

    def of_forward(self, op: Op) -> set[int]:
        """Births at the forward op whose derivative this one computes (its operand was already out of bounds there), or
        that it computes again."""
        if op.recomputed:
            first = [
                b.index
                for b in self
                if b.op is not None
                and b.step == op.step
                and not b.op.recomputed
                and (b.op.site, b.op.name, b.op.module) == (op.site, op.name, op.module)
            ]
            return set(first[:1])
        return {b.index for b in self if op.forward is not None and b.op is op.forward and not b.intended}

    def enter(self, scene: tuple, mask: torch.Tensor, nan: torch.Tensor, parents: set[int], infs: dict) -> int:
        """Enter a birth in the books."""
        op, schema, args, *_, tensor = scene
        if len(self._unintended) >= _MOST:
            return self._unintended[-1]
        values = dense(tensor)
        assert values is not None, "its bad elements have been seen"
        birth = Origin(op, _made(values, mask, nan), op.step)
        birth.parents = set(parents)
        birth.whole, birth.bad = bool(mask.all()), int(mask.sum())
        birth.shape, birth.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        birth.custom, birth.segment = op.custom, self.segment
        birth.after_model = op.after_model
        birth.rows = rows_of(mask, len(mask)) if schema.base == "ctc_loss" and mask.dim() == 1 else self._rows(mask)
        birth.folded = rows_of(mask, self.batch_size, self.folds) if birth.rows is None else None
        if schema.base == "nll_loss" and birth.rows is None:
            birth.rows = self._rows_picked(*args[:2])
        birth.numbers = self.take_scene(scene, mask)
        birth.intended = self._intended(birth, schema, infs)
        return self.add(birth)

    def _intended(self, birth: Origin, schema: Schema, infs: dict) -> bool:
        """A mask's infinity: written there as a number, or the log of a 0/1 tensor that no parameter reached."""
        if infs or "nan" in birth.made or birth.made == "mixed":
            return False
        if schema.base in _FILLS or any(isinstance(v, float) and math.isinf(v) for v in birth.numbers.scalars.values()):
            return True
        operand = next(iter(birth.numbers.operands), None)
        return (
            schema.base in _LOGS
            and birth.made == "-inf"
            and operand is not None
            and operand.two_valued
            and "parameter" not in operand.reached_by
        )

    def note_shape(self, tensor: torch.Tensor) -> None:
        """A tensor from outside: with no model to ask, the commonest first dimension of these is the batch size."""
        if tensor.dim() and len(tensor) > 1:
            self.leading[len(tensor)] += 1
            self.folds |= folds_of(tensor.shape)

    def external(self, tensor: torch.Tensor, memory: StorageInfo) -> dict[int, torch.Tensor]:
        """Enter a tensor that was bad when the step got it: {birth: mask of its bad elements}."""
        values = dense(tensor)
        assert values is not None, "its bad elements have been seen"
        bad, nan = ~finite(values), torch.isnan(values)
        birth = Origin(None, _made(values, bad, nan), self.recorder.step)
        birth.memory, birth.segment = memory, self.segment
        birth.whole, birth.bad = bool(bad.all()), int(bad.sum())
        birth.shape, birth.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        birth.rows = self._rows(bad) if memory.role in ("input", "target") else None
        birth.numbers = self.take_scene((None, None, (), {}, {}, tensor), bad)
        birth.intended = _mask_like(values, bad, nan, memory.role)
        return {self.add(birth): bad}

    def _rows_picked(self, scores: torch.Tensor, labels: torch.Tensor) -> tuple[int, ...] | None:
        """Rows whose label picks a bad score, for a loss that shows none of its rows any more."""
        if scores.dim() != 2 or labels.dim() != 1:
            return None
        counts = (labels >= 0) & (labels < scores.size(1))
        picked = scores.gather(1, labels.clamp(0, scores.size(1) - 1)[:, None])[:, 0]
        bad = ~finite(picked) & counts
        return self._rows(bad) if bool(bad.any()) else None

    def enters(self, birth: int, mask: torch.Tensor) -> None:
        """A bad tensor from outside is given to the model: in these rows."""
        self.records[birth].rows = self._rows(mask)

    def _rows(self, mask: torch.Tensor) -> tuple[int, ...] | None:
        return rows_of(mask, self.batch_size)

    def learn_rows(self, birth: int, mask: torch.Tensor, op: Op) -> None:
        """Where a birth's own tensor shows no batch dimension, the first that it reaches and that has one tells the
        rows; of a tensor from outside, of which parts may be dropped on the way, every later one is noted."""
        record = self.records[birth]
        if record.memory is None and not (record.op is not None and record.op.name in EMPTIES):
            record.rows = self._rows(mask) if record.rows is None else record.rows
        elif record.memory is None or record.memory.role in ("input", "target"):
            rows = self._rows(mask)
            if rows is not None:
                record.trail.append((op.index, rows))


def _made(values: torch.Tensor, mask: torch.Tensor, nan: torch.Tensor) -> str:
    """What came into being: "nan", "inf", "-inf", or "mixed"."""
    kinds = []
    if bool((mask & nan).any()):
        kinds.append("nan")
    if bool((mask & ~nan).any()):
        real = values.real if values.is_complex() else values
        signs = real[mask & ~nan]
        kinds += [k for k, hit in (("inf", signs > 0), ("-inf", signs < 0)) if bool(hit.any())]
    return kinds[0] if len(kinds) == 1 else "mixed"


def _mask_like(values: torch.Tensor, bad: torch.Tensor, nan: torch.Tensor, role: str) -> bool:
    """An infinity that a mask from outside holds on purpose: no NaN, and all other values equal;
    in a buffer, any others."""
    if role == "parameter" or bool(nan.any()) or values.is_complex():
        return False
    others = values[~bad]
    if role == "buffer":
        return bool((values[bad] < 0).all())
    return others.numel() == 0 or bool((others == others.flatten()[0]).all())
