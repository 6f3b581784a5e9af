"""The measurements of a watch, as plain numbers: the last steps whole, older ones thinned out, within a fixed size.
Counts and first occurrences are exact. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

SHRUNK = 0.99
"""A norm that falls below this share of what backward left was changed on purpose, not by rounding."""
SAME = 0.02
"""Divided by one constant (accumulation), the norms of all parameters and steps keep their ratio to this; clipping
brings them to one size instead."""
EARLY, FEW = 0.1, 3
"""Share of the scaler's steps, and how many at least, in which gradients were clipped too early: as in `diagnose`."""
CLIPPED = 1e-5
"""Relative: a step is clipped where the norm of all gradients fell by more than rounding does."""
TOTALS = 20
"""Totals of a step are kept this many times longer than its parameters."""
COLUMNS = ("step", "name", "norm", "norm_after", "weight_norm", "update_ratio")
TOTAL_COLUMNS = ("step", "loss", "norm", "norm_after", "clipped", "skipped", "lr", "scale")
Item = TypeVar("Item")


class ThinnedSeries(Generic[Item]):
    """A list that keeps its last `keep` items, and of older ones ever fewer: whenever it holds twice that, every second
    of the older half goes."""

    def __init__(self, keep: int):
        self.keep = keep
        self.items: list[Item] = []

    def append(self, item: Item) -> None:
        self.items.append(item)
        if len(self.items) > 2 * self.keep:
            older = len(self.items) - self.keep
            self.items[:older] = self.items[:older:2]


@dataclasses.dataclass(frozen=True, slots=True)
class StepRow:
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
    """One step in one line. loss: the sum of backward's roots; skipped: by the GradScaler; scale: the
    scale that it used."""

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


class WatchHistory:
    """rows: by step and parameter; totals: by step; steps, measured, clipped, skipped: exact counts; bad: the first
    step in which a parameter's gradient was not finite, and in how many; zero: for each parameter, in how many of its
    measured steps the gradient was exactly zero; scales: of a GradScaler."""

    def __init__(self, keep: int):
        self.rows: ThinnedSeries[StepRow] = ThinnedSeries(keep)
        self.totals: ThinnedSeries[Total] = ThinnedSeries(TOTALS * keep)
        self.scales = ScaleHistory(TOTALS * keep)
        self.steps = self.measured = self.clipped = self.skipped = 0
        self.bad: dict[int, list[float]] = {}  # number: first step, how many, the value
        self.zero: Counter[int] = Counter()
        self.measurements: Counter[int] = Counter()

    def add(self, total: Total, row: StepRow | None) -> None:
        self.totals.append(total)
        self.skipped += total.skipped
        if row is None:
            return
        self.measured += 1
        self.clipped += total.clipped
        self.rows.append(row)
        self.measurements.update(row.numbers)
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
        return {number: statistics.median(measurements) for number, measurements in values.items()}


class ScaleHistory:
    """series: (step, scale, skipped) of attempts, thinned out; attempts, skipped, most, least, last: exact; settled:
    attempts since the first that was not skipped; first: for each parameter, in how many of the skipped steps it was
    the first in backward's order whose gradient was not finite; nan: in how many of these it was NaN; growth: the
    scaler's growth interval, in steps, or None; checked: attempts in which scaled gradients were compared with those
    of the backward; early: their norms before and after, where they were clipped."""

    def __init__(self, keep: int):
        self.series: ThinnedSeries[tuple[int, float, bool]] = ThinnedSeries(keep)
        self.attempts = self.skipped = self.settled = 0
        self.initial = self.most = self.last = 0.0
        self.least = math.inf
        self.first: Counter[int] = Counter()
        self.nan: Counter[int] = Counter()
        self.growth: int | None = None
        self.checked = self.early_steps = 0
        self.early: list[tuple[float, float]] = []
        self._ratios: list[float] = []

    def add(self, step: int, scale: float, skipped: bool, norms: Mapping[int, float]) -> None:
        """An attempt. norms: of gradients by the parameters' numbers, which follow the order of the forward pass."""
        self.series.append((step, scale, skipped))
        self.initial = self.initial or scale
        self.attempts += 1
        self.most, self.least, self.last = max(self.most, scale), min(self.least, scale), scale
        if self.settled or not skipped:
            self.settled += 1
        if skipped:
            self.skipped += 1
            bad = [number for number, norm in norms.items() if not math.isfinite(norm)]
            if bad:
                self.first[max(bad)] += 1
                self.nan[max(bad)] += math.isnan(norms[max(bad)])

    def written(self, before: Mapping[int, float], after: Mapping[int, float]) -> None:
        """Norms by parameter after the backward, and of those that were written into before they were unscaled."""
        self.checked += 1
        pairs = [(before[n], v) for n, v in after.items() if math.isfinite(v) and 0 < before.get(n, 0.0) < math.inf]
        if not pairs:
            return
        ratios = [now / was for was, now in pairs]
        shrunk = math.hypot(*(now for _, now in pairs)) < SHRUNK * math.hypot(*(was for was, _ in pairs))
        if shrunk:
            self.early_steps += 1
            ratios += self._ratios
            self._ratios = [min(ratios), max(ratios)]
            self.early.append((math.hypot(*before.values()), math.hypot(*{**before, **after}.values())))
            del self.early[:-100]

    def clipped_early(self) -> bool:
        """Whether gradients are clipped while they carry the scale: made smaller, and not by one constant."""
        if self.early_steps < FEW or self.early_steps <= EARLY * self.checked or not self._ratios:
            return False
        return max(self._ratios) - min(self._ratios) > SAME * max(self._ratios)


def joint_norm(norms: Iterable[float]) -> float:
    """The norm of several parts together; NaN and inf go through."""
    values = [float(v) for v in norms]
    if any(map(math.isnan, values)):
        return math.nan
    largest = max(values, default=0.0)
    if largest == 0.0 or math.isinf(largest):
        return largest
    return largest * math.sqrt(sum((v / largest) ** 2 for v in values))


def doubles(values: Iterable[Any]) -> array[float]:
    return array("d", values)


def frame(history: WatchHistory, names: list[str]) -> Any:
    """A row for each step and parameter."""
    import pandas

    columns: dict[str, list[Any]] = {column: [] for column in COLUMNS}
    for row in history.rows.items:
        count = len(row.numbers)
        nothing = [math.nan] * count
        columns["step"] += [row.step] * count
        columns["name"] += [names[n] for n in row.numbers]
        columns["norm"] += row.before
        columns["norm_after"] += row.after
        columns["weight_norm"] += row.weight if row.weight is not None else nothing
        columns["update_ratio"] += row.ratio if row.ratio is not None else nothing
    return pandas.DataFrame(columns)


def totals(history: WatchHistory) -> Any:
    """A row for each step."""
    import pandas

    rows = [(t.step, t.loss, t.before, t.after, t.clipped, t.skipped, t.lr, t.scale) for t in history.totals.items]
    table = pandas.DataFrame(rows, columns=list(TOTAL_COLUMNS))
    return table.astype(dict.fromkeys(("loss", "norm", "norm_after", "lr", "scale"), float))
