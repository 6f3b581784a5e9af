"""From parameters to layers: gradient levels and their series by module, in the order of the model. No torch."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from nbdebug.robust_stats import rank_correlation
from nbdebug.tools.grad_watch.history import StepRow, WatchHistory, joint_norm

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
