"""From parameters to layers: levels and courses by module, in the order of the model. No torch."""

from __future__ import annotations

import fnmatch
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from nbdebug.chapters.training.watch.history import History, Row, together

LATEST = 10
"""Steps whose median is the present level of a layer."""


class Names(Protocol):
    """What is asked of a roster."""

    names: list[str]
    layers: list[str]
    sizes: list[int]
    matrix: list[bool]


def by_layer(names: Names, numbers: Sequence[int], matrices: bool = False) -> dict[str, list[int]]:
    """The numbers of each layer's parameters. matrices: only of those with two dimensions or more: the gradient of a
    bias may be zero by the nature of the model (before a normalisation, say)."""
    found: dict[str, list[int]] = {}
    for number in sorted(numbers):
        if names.matrix[number] or not matrices:
            found.setdefault(names.layers[number], []).append(number)
    return found


def levels(names: Names, history: History) -> list[tuple[str, float]]:
    """The root mean square of each layer's gradient, typical of the last steps."""
    norms = history.medians(LATEST)
    return [
        (layer, _level(names, [(n, norms[n]) for n in numbers]))
        for layer, numbers in by_layer(names, list(norms), matrices=True).items()
    ]


def courses(names: Names, history: History) -> dict[str, list[float]]:
    """The same, step by step."""
    found: dict[str, list[float]] = {}
    for row in history.rows.items:
        norms = dict(zip(row.numbers, row.before))
        for layer, numbers in by_layer(names, row.numbers, matrices=True).items():
            found.setdefault(layer, []).append(_level(names, [(n, norms[n]) for n in numbers]))
    return found


def _level(names: Names, norms: list[tuple[int, float]]) -> float:
    size = sum(names.sizes[n] for n, _ in norms)
    return together(norm for _, norm in norms) / math.sqrt(size) if size else 0.0


def matching(name: str, wanted: str) -> bool:
    """Whether a layer is asked for: by a part of its name, or by a pattern of all of it (with *, ? or [), in upper or
    lower case. Nothing asked: every layer."""
    name, wanted = name.lower(), wanted.strip().lower()
    return fnmatch.fnmatchcase(name, wanted) if any(c in wanted for c in "*?[") else wanted in name


def heat(names: Names, rows: Sequence[Row], most_layers: int, most_steps: int, wanted: str = "") -> dict[str, Any]:
    """The norms of the layers that are `wanted` over steps as plain lists: steps, layers, and log10 of each norm (None:
    no gradient; "zero", "nan" and "inf" for what has no logarithm). Where there are more than a picture holds,
    neighbours are put together: of steps the largest counts. table: each of them in numbers; layer counts: how many
    layers are wanted, of how many."""
    layers = by_layer(names, sorted(set().union(*(row.numbers for row in rows))))
    kept = {layer: numbers for layer, numbers in layers.items() if matching(layer, wanted)}
    groups = _groups(kept, most_layers)
    norms, bins = _norms(rows, list(groups.values())), _bins(len(rows), most_steps)
    cells = [[_cell([v for v in column[a:b] if v is not None]) for a, b in bins] for column in norms]
    ratios = _ratios(rows, list(groups.values()))
    table = [[layer, *_numbers(column, rows), ratio] for layer, column, ratio in zip(groups, norms, ratios)]
    return {
        "steps": [rows[a].step for a, _ in bins],
        "layers": list(groups),
        "norms": cells,
        "table": table,
        "layer counts": [len(kept), len(layers)],
    }


def _norms(rows: Sequence[Row], groups: list[list[int]]) -> list[list[float | None]]:
    """For each group of parameters its norm in each row; None where none of them had a gradient."""
    found: list[list[float | None]] = [[] for _ in groups]
    for row, places in _placed(rows, groups):
        for column, at in zip(found, places):
            column.append(row.before[at[0]] if len(at) == 1 else together([row.before[i] for i in at]) if at else None)
    return found


def _ratios(rows: Sequence[Row], groups: list[list[int]]) -> list[float | None]:
    """For each group how far a step moves it, over its own norm: the median of the last steps that were measured."""
    found: list[list[float]] = [[] for _ in groups]
    for row, places in _placed([row for row in rows if row.weight is not None][-LATEST // 2 :], groups):
        weights, ratios = row.weight or (), row.ratio or ()
        for column, at in zip(found, places):
            norm, moved = together([weights[i] for i in at]), together([weights[i] * ratios[i] for i in at])
            column += [moved / norm] if norm > 0 and math.isfinite(moved / norm) else []
    return [float(f"{statistics.median(column):.3g}") if column else None for column in found]


def _placed(rows: Sequence[Row], groups: list[list[int]]) -> Iterator[tuple[Row, list[list[int]]]]:
    """Each row with the places that the groups have in it: nearly always the same in all."""
    known: dict[bytes, list[list[int]]] = {}
    for row in rows:
        places = known.get(key := row.numbers.tobytes())
        if places is None:
            at = {number: place for place, number in enumerate(row.numbers)}
            places = known[key] = [[at[n] for n in numbers if n in at] for numbers in groups]
        yield row, places


def _numbers(norms: list[float | None], rows: Sequence[Row]) -> list[Any]:
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
        found: dict[str, list[int]] = {}
        for name, members in layers.items():
            found.setdefault(".".join(name.split(".")[:depth]), []).extend(members)
        if len(found) <= most:
            return found
    listed = list(found.items())
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
