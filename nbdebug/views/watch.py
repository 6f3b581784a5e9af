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
from nbdebug.views.words import Table, clean, clip, number

Points = tuple[tuple[float, float], ...]
_KEYS = ("3b3f8f", "3d62a8", "3f86b4", "4aa6ad", "6cbf9a", "a3cf86", "dcd878", "f2b45f", "e8823f")
_BETWEEN = 3


def _shades() -> tuple[str, ...]:
    """The keys, and `_BETWEEN` steps from each to the next."""
    parts = [[int(key[i : i + 2], 16) for i in (0, 2, 4)] for key in _KEYS]
    mixed = [
        [a + (b - a) * step / _BETWEEN for a, b in zip(one, other)]
        for one, other in itertools.pairwise(parts)
        for step in range(_BETWEEN)
    ]
    last = [float(v) for v in parts[-1]]
    return tuple("#" + "".join(f"{round(v):02x}" for v in colour) for colour in [*mixed, last])


PALETTE = _shades()
"""From small to large, mostly told apart by lightness too."""
TABLE = ("Layer", "Norm now", "Smallest", "Largest", "in step", "Update / weight")
BAD, ZERO = "#d4564c", "#80808055"
"""Not finite; exactly zero. No gradient has no colour."""


class LogScale(Scale):
    """A logarithmic scale where the values span little, too: its ticks are then no powers of ten."""

    def _powers(self, most: int) -> list[float]:
        found = super()._powers(most)
        if len(found) < 2:
            power = math.floor(math.log10(self.low))
            found = [v for n in range(3) for k in (1, 2, 5) if self.low <= (v := k * 10.0 ** (power + n)) <= self.high]
        return found if len(found) > 1 else [v for v in self._even(most) if v >= self.low]


@dataclasses.dataclass(frozen=True)
class Watched:
    """steps: of the map's columns; layers: of its rows, each with log10 of its norms (None, or "zero", "nan", "inf");
    curves: name and points; clipped: steps; seen: how many steps there were; rows: of the table, as `layers.heat` gives
    them; counts: how many layers are drawn, of how many; skipped: steps that a GradScaler left out.

    From a panel: asked: the layers that were asked for ("": all of them; None: it is no panel's); log: logarithmic
    scales or linear ones (None: as the values want it)."""

    steps: tuple[int, ...]
    layers: tuple[tuple[str, tuple[Any, ...]], ...]
    curves: tuple[tuple[str, Points], ...]
    clipped: tuple[float, ...]
    seen: int
    rows: tuple[tuple[Any, ...], ...] = ()
    counts: tuple[int, int] = (0, 0)
    asked: str | None = None
    log: bool | None = None
    skipped: tuple[float, ...] = ()

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
        share = (value - low) / (high - low) if self.log is not False else 10 ** min(0.0, value - high)
        share = min(1.0, max(0.0, share))
        return PALETTE[min(len(PALETTE) - 1, int(share * len(PALETTE)))]

    def scale(self, values: Sequence[float]) -> Scale:
        """The scale of a curve: the one that the values want, or the one that was asked for. What falls below zero has
        no logarithm."""
        if self.log and min(values) >= 0 and max(values) > 0:
            above = [v for v in values if v > 0]
            return LogScale(min(above) / 1.1, max(above) * 1.1, True)
        fitting = Scale.around(values)
        if self.log is not False or not fitting.log:
            return fitting
        return Scale(0.0, max(values) * 1.06)

    def title(self) -> str:
        """What stands above the map."""
        said = f"gradient norm of each layer{', first layer on top' * (len(self.layers) > 1)}"
        if self.asked:
            shown, (drawn, of) = clip(self.asked, 24), self.counts
            said = (
                f"gradient norm of the {number(drawn)} of {number(of)} layers that match “{shown}”"
                if drawn
                else f"none of {number(of)} layers matches “{shown}”"
            )
        return said + "; linear colours" * (self.log is False and bool(self.layers))

    def table(self, most: int) -> Table:
        """The layers of the map in numbers."""
        body = tuple(
            (name, *(number(v) if v is not None else "" for v in (latest, least, largest, step, ratio)))
            for name, latest, least, largest, step, ratio in self.rows[:most]
        )
        return Table("", TABLE, body, len(self.rows) - len(body))

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        low, high = self.span
        said = (
            f"Gradient norms of {len(self.layers)} layers over {number(self.seen)} steps, from 10^{low:.1f} to "
            f"10^{high:.1f}"
        )
        said += f", of {number(self.counts[1])}: those that match “{clip(self.asked, 80)}”" if self.asked else ""
        said += f"; not finite in {clip(', '.join(self.bad), 120)}" if self.bad else ""
        for name, points in self.curves:
            values = [y for _, y in points]
            said += (
                f"; {name} {number(values[0])} at first, {number(values[-1])} at last, between "
                f"{number(min(values))} and {number(max(values))}"
            )
        said += f"; GradScaler left out {number(len(self.skipped))} of the steps drawn" if self.skipped else ""
        return said + (f"; clipped in {number(len(self.clipped))} of the steps drawn" if self.clipped else "") + "."


def read(facts: Mapping[str, Any]) -> Watched | None:
    """The Watched of `facts["watch"]`, or None when there is nothing in it to draw."""
    given = facts.get("watch")
    if not isinstance(given, Mapping):
        return None
    steps = tuple(s for s in _list(given, "steps") if isinstance(s, int))
    names, norms = _list(given, "layers"), _list(given, "norms")
    layers = tuple(
        (clean(name, 80), tuple(map(_cell, row)))
        for name, row in zip(names, norms)
        if isinstance(row, (list, tuple)) and len(row) == len(steps)
    )
    totals = _list(given, "totals")
    known = (
        ("loss", _points(_list(given, "losses"))),
        ("validation loss", _points(_list(given, "validation"))),
        ("gradient norm", _points(totals)),
        ("after clipping", _points(totals, 2)),
        ("loss scale", _points(_list(given, "scale"))),
    )
    clipped, skipped = (tuple(float(s) for s in _list(given, key) if _finite(s)) for key in ("clipped", "skipped"))
    curves = tuple((name, points) for name, points in known if points and (name != "after clipping" or clipped))
    if not curves and not (layers and steps):
        return None
    seen, asked, log = (given.get(key) for key in ("steps seen", "asked", "log"))
    drawn, of = (*(n for n in _list(given, "layer counts") if isinstance(n, int)), len(layers), len(layers))[:2]
    return Watched(
        steps,
        layers if steps else (),
        curves,
        clipped,
        seen if isinstance(seen, int) else len(steps),
        tuple(map(_row, _list(given, "table"))),
        (drawn, of),
        clean(asked, 200) if isinstance(asked, str) else None,
        log if isinstance(log, bool) else None,
        skipped,
    )


def _list(given: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = given.get(key)
    return value if isinstance(value, (list, tuple)) else ()


def _cell(value: Any) -> Any:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else "inf"
    return value if value in ("zero", "nan", "inf") else None


def _row(given: Any) -> tuple[Any, ...]:
    """A row of the table: a name, and five numbers or None."""
    values = [v if isinstance(v, numbers.Real) else None for v in given[1:]] if isinstance(given, (list, tuple)) else []
    return (clean(given[0], 80) if values else "", *(values + [None] * 5)[:5])


def _points(rows: Sequence[Any], column: int = 1) -> Points:
    return tuple(
        (float(row[0]), float(row[column]))
        for row in rows
        if isinstance(row, (list, tuple)) and len(row) > column and _finite(row[0]) and _finite(row[column])
    )


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and -1e300 < value < 1e300
