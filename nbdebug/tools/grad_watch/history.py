"""The measurements of a watch, as plain numbers: the last steps whole, older ones thinned out, within a fixed size; and
from parameters to layers: levels and their series by module, in the order of the model. Counts and first occurrences
are exact. No torch.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from nbdebug.robust_stats import rank_correlation

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
    of the backward; early: their norms before and after, where they were clipped; carried: the norm and the scale of
    steps without the scaler, on gradients of a scaled loss."""

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
        self.carried: list[tuple[float, float]] = []
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


LATEST = 10
"""Steps whose median is the present level of a layer."""
LAYERS = 4
"""Fewer layers than these have no trend."""
DECADES = 4.0
"""Between the first and the last quarter of the layers: the gradient is 10,000 times smaller. Over all layers of the
healthy trainings in tests/training/healthy.py (residual, recurrent and adversarial ones, a deep stack of ReLUs) the
largest gradient is 40 times the smallest at most."""
FROM_MEDIAN = 1.5
"""Decades between the first quarter and the median layer."""
ORDERLY = 0.8
"""Rank correlation of level and depth: it is the depth that does it."""
FELL = 3.0
"""Decades by which a layer's gradient has fallen against its own past, with the median layer's own fall taken out."""
PAST, NOW = 20, 10
"""Steps that make a past, and a present."""


class LayerNames(Protocol):
    """The part of WatchedParameters that is used here."""

    names: list[str]
    layers: list[str]
    sizes: list[int]
    matrix: list[bool]


def by_layer(names: LayerNames, numbers: Sequence[int], matrices: bool = False) -> dict[str, list[int]]:
    """The numbers of each layer's parameters. matrices: only of those with two dimensions or more: the gradient of a
    bias may be zero by the nature of the model (before a normalisation, say)."""
    layers: dict[str, list[int]] = {}
    for number in sorted(numbers):
        if names.matrix[number] or not matrices:
            layers.setdefault(names.layers[number], []).append(number)
    return layers


def levels(names: LayerNames, history: WatchHistory) -> list[tuple[str, float]]:
    """The root mean square of each layer's gradient, typical of the last steps."""
    norms = history.medians(LATEST)
    return [
        (layer, _level(names, [(n, norms[n]) for n in numbers]))
        for layer, numbers in by_layer(names, list(norms), matrices=True).items()
    ]


def layer_series(names: LayerNames, history: WatchHistory) -> dict[str, list[float]]:
    """The same, step by step."""
    series: dict[str, list[float]] = {}
    for row in history.rows.items:
        norms = dict(zip(row.numbers, row.before))
        for layer, numbers in by_layer(names, row.numbers, matrices=True).items():
            series.setdefault(layer, []).append(_level(names, [(n, norms[n]) for n in numbers]))
    return series


def _level(names: LayerNames, norms: list[tuple[int, float]]) -> float:
    size = sum(names.sizes[n] for n, _ in norms)
    return joint_norm(norm for _, norm in norms) / math.sqrt(size) if size else 0.0


@dataclasses.dataclass(frozen=True)
class Depth:
    """kind: "vanishes" or "explodes", towards the first layer. first, last: typical level of the first and the last
    quarter; at: the pair of layers between which it changes most, from back to front; decades: by how many."""

    kind: str
    first: float
    last: float
    layer: str
    at: tuple[str, str]
    decades: float


def depth_trend(levels: Sequence[tuple[str, float]]) -> Depth | None:
    """What the levels of layers, from first to last, show."""
    known = [(name, math.log10(level)) for name, level in levels if level > 0 and math.isfinite(level)]
    if len(known) < LAYERS:
        return None
    logs = [level for _, level in known]
    quarter = max(1, len(logs) // 4)
    first, last = statistics.median(logs[:quarter]), statistics.median(logs[-quarter:])
    fall, middle = last - first, statistics.median(logs)
    orderly = rank_correlation(logs)
    kind = (
        "vanishes"
        if fall >= DECADES and middle - first >= FROM_MEDIAN and orderly >= ORDERLY
        else "explodes"
        if -fall >= DECADES and first - middle >= FROM_MEDIAN and orderly <= -ORDERLY
        else None
    )
    if kind is None:
        return None
    sign = 1 if kind == "vanishes" else -1
    steepest = max(range(1, len(known)), key=lambda i: sign * (logs[i] - logs[i - 1]))
    worst = min(range(len(known)), key=lambda i: sign * logs[i])
    return Depth(kind, 10**first, 10**last, known[worst][0], (known[steepest][0], known[steepest - 1][0]), abs(fall))


def faded_layers(courses: Mapping[str, Sequence[float]]) -> list[tuple[str, float]]:
    """Layers whose gradient has fallen against their own past and the others': (layer, how many times smaller).

    courses: for each layer its levels, step by step, oldest first."""
    decades: dict[str, float] = {}
    for name, levels in courses.items():
        known = [math.log10(v) for v in levels if v > 0 and math.isfinite(v)]
        if len(known) >= PAST + NOW:
            decades[name] = statistics.median(known[:-NOW][-5 * PAST :]) - statistics.median(known[-NOW:])
    if len(decades) < 2:
        return []
    usual = statistics.median(decades.values())
    return [(name, 10 ** (by - usual)) for name, by in decades.items() if by - usual >= FELL]


def jumps(norms: Sequence[tuple[int, float]], times: float = 10.0) -> list[tuple[int, float]]:
    """Steps whose norm is over `times` the median of the 20 before (trainproof's rule, with a rolling median): (step,
    how many times)."""
    rises, calm = [], []  # type: ignore[var-annotated]
    for step, norm in norms:
        if not math.isfinite(norm):
            continue
        usual = statistics.median(calm[-PAST:]) if len(calm) >= PAST // 2 else 0.0
        if usual > 0 and norm > times * usual:
            rises.append((step, norm / usual))
        calm.append(norm)
    return rises


def name_matches(name: str, pattern: str) -> bool:
    """Whether the pattern is a part of the name, or matches all of it (with *, ? or [), in upper or lower case. An
    empty one matches every layer."""
    name, pattern = name.lower(), pattern.strip().lower()
    return fnmatch.fnmatchcase(name, pattern) if any(c in pattern for c in "*?[") else pattern in name


def heatmap(
    names: LayerNames, rows: Sequence[StepRow], most_layers: int, most_steps: int, pattern: str = ""
) -> dict[str, Any]:
    """The norms of the layers that match over steps as plain lists: steps, layers, and log10 of each norm (None:
    no gradient; "zero", "nan" and "inf" for what has no logarithm). Where there are more than a picture holds,
    neighbours are merged: of steps the largest counts. table: each of them in numbers; layer counts: how many
    layers match, of how many."""
    layers = by_layer(names, sorted(set().union(*(row.numbers for row in rows))))
    matches = {layer: numbers for layer, numbers in layers.items() if name_matches(layer, pattern)}
    groups = _groups(matches, most_layers)
    norms, bins = _norms(rows, list(groups.values())), _bins(len(rows), most_steps)
    cells = [[_cell([v for v in column[a:b] if v is not None]) for a, b in bins] for column in norms]
    ratios = _ratios(rows, list(groups.values()))
    table = [[layer, *_numbers(column, rows), ratio] for layer, column, ratio in zip(groups, norms, ratios)]
    return {
        "steps": [rows[a].step for a, _ in bins],
        "layers": list(groups),
        "norms": cells,
        "table": table,
        "layer counts": [len(matches), len(layers)],
    }


def _norms(rows: Sequence[StepRow], groups: list[list[int]]) -> list[list[float | None]]:
    """For each group of parameters its norm in each row; None where none of them had a gradient."""
    columns: list[list[float | None]] = [[] for _ in groups]
    for row, places in _placed(rows, groups):
        for column, at in zip(columns, places):
            column.append(
                row.before[at[0]] if len(at) == 1 else joint_norm([row.before[i] for i in at]) if at else None
            )
    return columns


def _ratios(rows: Sequence[StepRow], groups: list[list[int]]) -> list[float | None]:
    """For each group how far a step moves it, over its own norm: the median of the last steps that were measured."""
    columns: list[list[float]] = [[] for _ in groups]
    for row, places in _placed([row for row in rows if row.weight is not None][-LATEST // 2 :], groups):
        weights, ratios = row.weight or (), row.ratio or ()
        for column, at in zip(columns, places):
            norm, moved = joint_norm([weights[i] for i in at]), joint_norm([weights[i] * ratios[i] for i in at])
            column += [moved / norm] if norm > 0 and math.isfinite(moved / norm) else []
    return [float(f"{statistics.median(column):.3g}") if column else None for column in columns]


def _placed(rows: Sequence[StepRow], groups: list[list[int]]) -> Iterator[tuple[StepRow, list[list[int]]]]:
    """Each row with the places that the groups have in it: nearly always the same in all."""
    known: dict[bytes, list[list[int]]] = {}
    for row in rows:
        places = known.get(key := row.numbers.tobytes())
        if places is None:
            at = {number: place for place, number in enumerate(row.numbers)}
            places = known[key] = [[at[n] for n in numbers if n in at] for numbers in groups]
        yield row, places


def _numbers(norms: list[float | None], rows: Sequence[StepRow]) -> list[Any]:
    """What is typical of the last steps, the smallest, the largest, and its step; as far as they are finite."""
    known = [(v, row.step) for v, row in zip(norms, rows) if v is not None]
    finite = [(v, step) for v, step in known if math.isfinite(v)]
    if len(finite) < len(known):
        bad = next((v, step) for v, step in known if not math.isfinite(v))
        return [*(float(f"{v:.3g}") for v in (known[-1][0], min(finite, default=bad)[0])), *bad]
    latest, largest = statistics.median([v for v, _ in finite[-LATEST:]]), max(finite)
    return [*(float(f"{v:.3g}") for v in (latest, min(finite)[0], largest[0])), largest[1]]


def _bins(count: int, most: int) -> list[tuple[int, int]]:
    parts = min(most, count)
    return list(itertools.pairwise(count * i // parts for i in range(parts + 1))) if parts else []


def _groups(layers: dict[str, list[int]], most: int) -> dict[str, list[int]]:
    """Layers by name; of too many the common beginnings of their names, and neighbours in the end."""
    for depth in range(max((name.count(".") for name in layers), default=0) + 1, 0, -1):
        groups: dict[str, list[int]] = {}
        for name, members in layers.items():
            groups.setdefault(".".join(name.split(".")[:depth]), []).extend(members)
        if len(groups) <= most:
            return groups
    listed = list(groups.items())
    merged: dict[str, list[int]] = {}
    for i in range(most):
        part = listed[len(listed) * i // most : len(listed) * (i + 1) // most]
        merged[part[0][0] if len(part) == 1 else f"{part[0][0]} … {part[-1][0]}"] = [n for _, ns in part for n in ns]
    return merged


def _cell(values: list[float]) -> float | str | None:
    if not values:
        return None
    if any(map(math.isnan, values)):
        return "nan"
    largest = max(values)
    return "inf" if math.isinf(largest) else round(math.log10(largest), 2) if largest > 0 else "zero"
