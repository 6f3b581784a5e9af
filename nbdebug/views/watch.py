"""What a gradient watch has seen, as the SVG and the figure draw it: a map of layers over steps, and curves.

`read` takes the plain facts of a report and gives a Watched, or None.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.views.course import Scale
from nbdebug.views.words import clean, clip, number

Points = tuple[tuple[float, float], ...]
_KEYS = ("3b3f8f", "3d62a8", "3f86b4", "4aa6ad", "6cbf9a", "a3cf86", "dcd878", "f2b45f", "e8823f")
_BETWEEN = 3


def _shades() -> tuple[str, ...]:
    """The keys, and `_BETWEEN` steps from each to the next."""
    parts = [[int(key[i:i + 2], 16) for i in (0, 2, 4)] for key in _KEYS]
    mixed = [[a + (b - a) * step / _BETWEEN for a, b in zip(one, other)]
             for one, other in itertools.pairwise(parts) for step in range(_BETWEEN)]
    last = [float(v) for v in parts[-1]]
    return tuple("#" + "".join(f"{round(v):02x}" for v in colour) for colour in [*mixed, last])


PALETTE = _shades()
"""From small to large, mostly told apart by lightness too."""
BAD, ZERO = "#d4564c", "#80808055"
"""Not finite; exactly zero. No gradient has no colour."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """steps: of the map's columns; layers: of its rows, each with log10 of its norms (None, or "zero", "nan", "inf");
    curves: name and points; clipped: steps; bad: layers with what is not finite."""

    steps: tuple[int, ...]
    layers: tuple[tuple[str, tuple[Any, ...]], ...]
    curves: tuple[tuple[str, Points], ...]
    clipped: tuple[float, ...]
    seen: int

    @functools.cached_property
    def span(self) -> tuple[float, float]:
        """The smallest and largest log10 that the colours tell apart: at most ten decades below the largest."""
        known = [v for _, row in self.layers for v in row if isinstance(v, float)]
        if not known:
            return 0.0, 1.0
        high = max(known)
        return max(min(known), high - 10, -300.0), max(high, min(known) + 0.5)

    @functools.cached_property
    def bad(self) -> list[str]:
        return [name for name, row in self.layers if any(v in ("nan", "inf") for v in row)]

    @functools.cached_property
    def across(self) -> Scale:
        places = [*self.steps, *(x for _, points in self.curves for x, _ in points)]
        return Scale(min(places), max(*places, min(places) + 1))

    def colour(self, value: Any) -> str | None:
        """The colour of a cell; None where there was no gradient."""
        if value is None:
            return None
        if isinstance(value, str):
            return ZERO if value == "zero" else BAD
        low, high = self.span
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return PALETTE[min(len(PALETTE) - 1, int(share * len(PALETTE)))]

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        low, high = self.span
        said = (f"Gradient norms of {len(self.layers)} layers over {number(self.seen)} steps, from 10^{low:.1f} to "
                f"10^{high:.1f}")
        said += f"; not finite in {clip(', '.join(self.bad), 120)}" if self.bad else ""
        for name, points in self.curves:
            values = [y for _, y in points]
            said += (f"; {name} {number(values[0])} at first, {number(values[-1])} at last, between "
                     f"{number(min(values))} and {number(max(values))}")
        return said + (f"; clipped in {number(len(self.clipped))} of the steps drawn" if self.clipped else "") + "."


def read(facts: Mapping[str, Any]) -> Watched | None:
    """The Watched of `facts["watch"]`, or None when there is nothing in it to draw."""
    given = facts.get("watch")
    if not isinstance(given, Mapping):
        return None
    steps = tuple(s for s in _list(given, "steps") if isinstance(s, int))
    names, norms = _list(given, "layers"), _list(given, "norms")
    layers = tuple((clean(name, 80), tuple(map(_cell, row))) for name, row in zip(names, norms)
                   if isinstance(row, (list, tuple)) and len(row) == len(steps))
    totals = _list(given, "totals")
    known = (("loss", _points(_list(given, "losses"))), ("validation loss", _points(_list(given, "validation"))),
             ("gradient norm", _points(totals)), ("after clipping", _points(totals, 2)))
    clipped = tuple(float(s) for s in _list(given, "clipped") if isinstance(s, numbers.Real))
    curves = tuple((name, points) for name, points in known if points and (name != "after clipping" or clipped))
    if not curves and not (layers and steps):
        return None
    seen = given.get("steps seen")
    return Watched(steps, layers if steps else (), curves, clipped, seen if isinstance(seen, int) else len(steps))


def _list(given: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = given.get(key)
    return value if isinstance(value, (list, tuple)) else ()


def _cell(value: Any) -> Any:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else "inf"
    return value if value in ("zero", "nan", "inf") else None


def _points(rows: Sequence[Any], column: int = 1) -> Points:
    return tuple((float(row[0]), float(row[column])) for row in rows
                 if isinstance(row, (list, tuple)) and len(row) > column and _finite(row[0]) and _finite(row[column]))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and -1e300 < value < 1e300
