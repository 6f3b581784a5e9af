"""What a watch has seen, as plain numbers: the last steps whole, older ones thinned out, so that it never outgrows a
fixed size. Counts and first sightings are exact. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

from nbdebug.chapters.training.watch.scales import Scales
from nbdebug.chapters.training.watch.thinned import Thinned

CLIPPED = 1e-5
"""Relative: a step is clipped where the norm of all gradients fell by more than rounding does."""
TOTALS = 20
"""Steps are kept so many times longer as one line each than with all their parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One step: numbers of the parameters that had a gradient; its norm before and after clipping; weight's norm and
    update ratio, NaN-filled where they were not measured (`measured` says so)."""

    step: int
    numbers: array[int]
    before: array[float]
    after: array[float]
    weight: array[float] | None = None
    ratio: array[float] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Total:
    """One step in one line. loss: the sum of backward's roots; skipped: the update was left out by GradScaler; scale:
    the scale that it used."""

    step: int
    loss: float | None
    before: float | None
    after: float | None
    skipped: bool = False
    lr: float | None = None
    scale: float | None = None

    @property
    def clipped(self) -> bool:
        return self.before is not None and self.after is not None and self.after < self.before * (1 - CLIPPED)


class History:
    """rows: by step and parameter; totals: by step; steps, measured, clipped, skipped: exact counts; bad: the first
    step in which a parameter's gradient was not finite, and in how many; zero: for each parameter, in how many of its
    measured steps the gradient was exactly zero; scales: of a GradScaler."""

    def __init__(self, keep: int):
        self.rows: Thinned[Row] = Thinned(keep)
        self.totals: Thinned[Total] = Thinned(TOTALS * keep)
        self.scales = Scales(TOTALS * keep)
        self.steps = self.measured = self.clipped = self.skipped = 0
        self.bad: dict[int, list[float]] = {}  # number: first step, how many, the value
        self.zero: Counter[int] = Counter()
        self.seen: Counter[int] = Counter()

    def add(self, total: Total, row: Row | None) -> None:
        self.totals.append(total)
        self.skipped += total.skipped
        if row is None:
            return
        self.measured += 1
        self.clipped += total.clipped
        self.rows.append(row)
        self.seen.update(row.numbers)
        for number, value in zip(row.numbers, row.before):
            if value == 0.0:
                self.zero[number] += 1
            elif not math.isfinite(value) and not total.skipped:
                self.bad.setdefault(number, [row.step, 0, value])[1] += 1

    def norms(self, number: int) -> list[tuple[int, float]]:
        """(step, norm before clipping) of one parameter, as far as kept."""
        return [
            (row.step, row.before[place])
            for row in self.rows.items
            for place, known in enumerate(row.numbers)
            if known == number
        ]

    def medians(self, last: int, what: str = "before") -> dict[int, float]:
        """The median of each parameter's norm (or "weight", "ratio") over the last rows that have it."""
        values: dict[int, list[float]] = {}
        rows = [row for row in self.rows.items if getattr(row, what) is not None]
        for row in rows[-last:]:
            for number, value in zip(row.numbers, getattr(row, what)):
                if math.isfinite(value):
                    values.setdefault(number, []).append(value)
        return {number: statistics.median(found) for number, found in values.items()}


def together(norms: Iterable[float]) -> float:
    """The norm of several parts together; NaN and inf go through."""
    found = [float(v) for v in norms]
    if any(map(math.isnan, found)):
        return math.nan
    largest = max(found, default=0.0)
    if largest == 0.0 or math.isinf(largest):
        return largest
    return largest * math.sqrt(sum((v / largest) ** 2 for v in found))


def doubles(values: Iterable[Any]) -> array[float]:
    return array("d", values)
