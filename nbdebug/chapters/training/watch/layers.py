"""From parameters to layers: levels and courses by module, in the order of the model. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

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
    return [(layer, _level(names, [(n, norms[n]) for n in numbers]))
            for layer, numbers in by_layer(names, list(norms), matrices=True).items()]


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


def heat(names: Names, rows: Sequence[Row], most_layers: int, most_steps: int) -> dict[str, object]:
    """The norms of layers over steps as plain lists: steps, layers, and log10 of each norm (None: no gradient; "zero",
    "nan" and "inf" for what has no logarithm). Where there are more than a picture holds, neighbours are put together:
    of steps the largest counts."""
    bins = _bins(rows, most_steps)
    groups = _groups(names, sorted({n for row in rows for n in row.numbers}), most_layers)
    table = []
    for numbers in groups.values():
        wanted = set(numbers)
        table.append([_cell([together(v for n, v in zip(row.numbers, row.before) if n in wanted) for row in several
                             if not wanted.isdisjoint(row.numbers)]) for several in bins])
    return {"steps": [several[0].step for several in bins], "layers": list(groups), "norms": table}


def _bins(rows: Sequence[Row], most: int) -> list[Sequence[Row]]:
    count = min(most, len(rows))
    edges = [len(rows) * i // count for i in range(count + 1)] if count else []
    return [rows[a:b] for a, b in itertools.pairwise(edges)]


def _groups(names: Names, numbers: Sequence[int], most: int) -> dict[str, list[int]]:
    """Layers by name; of too many the common beginnings of their names, and neighbours in the end."""
    layers = by_layer(names, numbers)
    for depth in range(max((name.count(".") for name in layers), default=0) + 1, 0, -1):
        found: dict[str, list[int]] = {}
        for name, members in layers.items():
            found.setdefault(".".join(name.split(".")[:depth]), []).extend(members)
        if len(found) <= most:
            return found
    listed = list(found.items())
    merged: dict[str, list[int]] = {}
    for i in range(most):
        part = listed[len(listed) * i // most:len(listed) * (i + 1) // most]
        merged[part[0][0] if len(part) == 1 else f"{part[0][0]} … {part[-1][0]}"] = [n for _, ns in part for n in ns]
    return merged


def _cell(values: list[float]) -> float | str | None:
    if not values:
        return None
    if any(map(math.isnan, values)):
        return "nan"
    largest = max(values)
    return "inf" if math.isinf(largest) else round(math.log10(largest), 2) if largest > 0 else "zero"
