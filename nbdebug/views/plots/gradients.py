"""A gradient watch: a map of layers over steps, coloured by gradient norm, and curves of loss, norm and loss scale."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.report import Report
from nbdebug.text import clip, clip_start, count, figures
from nbdebug.views.plots.axes import LogScale, Panel, Points, RunScale
from nbdebug.views.plots.marks import (
    FAULT,
    INK,
    SECOND,
    VALUES,
    WIDTH,
    Bar,
    Drawing,
    Lines,
    Mark,
    Pixels,
    Text,
    curve,
    image,
)
from nbdebug.views.wording import TextTable, clean, number

LEFT, RIGHT, TOP, GAP, TALL = 150, WIDTH - 14, 24, 34, 64
PANELS = (("loss", "validation loss"), ("gradient norm", "after clipping"), ("loss scale",))
BELOW = {"gradient norm": "clipped", "loss scale": "skipped"}
"""Panels with short marks below: what steps they mark."""
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
BAD, ZERO = FAULT, "#80808055"
"""Not finite; exactly zero. No gradient has no colour."""


@dataclasses.dataclass(frozen=True)
class GradientMap:
    """steps: of the map's columns; layers: of its rows, each with log10 of its norms (None, or "zero", "nan", "inf");
    curves: name and points; clipped: steps; total: how many steps there were; rows: of the table;
    counts: how many layers are drawn, of how many; skipped: steps that a GradScaler left out.

    From a panel: pattern: of the layers that it shows ("": all of them; None: it is no panel's); log: logarithmic
    scales or linear ones (None: as the values want it)."""

    steps: tuple[int, ...]
    layers: tuple[tuple[str, tuple[Any, ...]], ...]
    curves: tuple[tuple[str, Points], ...]
    clipped: tuple[float, ...]
    total: int
    rows: tuple[tuple[Any, ...], ...] = ()
    counts: tuple[int, int] = (0, 0)
    pattern: str | None = None
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
    def across(self) -> RunScale:
        places = [*self.steps, *(x for _, points in self.curves for x, _ in points)]
        return RunScale(min(places), max(*places, min(places) + 1))

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

    def scale(self, values: Sequence[float]) -> RunScale:
        """The scale of a curve: as the values want it, or as the panel is set. What falls below zero has
        no logarithm."""
        if self.log and min(values) >= 0 and max(values) > 0:
            above = [v for v in values if v > 0]
            return LogScale(min(above) / 1.1, max(above) * 1.1, True)
        fitting = RunScale.around(values)
        if self.log is not False or not fitting.log:
            return fitting
        return RunScale(0.0, max(values) * 1.06)

    def title(self) -> str:
        """The head of the map."""
        text = f"gradient norm of each layer{', first layer on top' * (len(self.layers) > 1)}"
        if self.pattern:
            pattern, (drawn, of) = clip(self.pattern, 24), self.counts
            text = (
                f"gradient norm of the {number(drawn)} of {number(of)} layers that match “{pattern}”"
                if drawn
                else f"none of {number(of)} layers matches “{pattern}”"
            )
        return text + "; linear colours" * (self.log is False and bool(self.layers))

    def drawing(self) -> Drawing:
        marks: list[Mark] = []
        top, known = float(TOP), dict(self.curves)
        for names in PANELS:
            curves = [(name, known[name]) for name in names if name in known]
            if curves:
                frame = Panel(self.across, self.scale([y for _, p in curves for _, y in p]), LEFT, RIGHT, top, TALL)
                marks += [*_panel(curves, frame), *_below(self, curves[0][0], frame)]
                top += TALL + GAP
        if self.layers:
            marks += _map(self, top)
            top += _row_height(self) * len(self.layers) + GAP
        elif self.pattern:
            marks.append(Text(LEFT, top + 24, self.title()))
        marks += Panel(self.across, self.across, LEFT, RIGHT, top - GAP - TALL, TALL).axis()
        tall = top + 14 if self.layers else top + 38 if self.pattern else top + 8
        return Drawing([*marks, *_legend(self, top - 4)], tall)

    def table(self, most: int) -> TextTable:
        """The layers of the map in numbers."""
        body = tuple(
            (name, *(number(v) if v is not None else "" for v in (latest, least, largest, step, ratio)))
            for name, latest, least, largest, step, ratio in self.rows[:most]
        )
        return TextTable("", TABLE, body, len(self.rows) - len(body))

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        low, high = self.span
        text = (
            f"Gradient norms of {count(len(self.layers), 'layer')} over {count(self.total, 'step')}, from "
            f"{figures(10**low, 2)} to {figures(10**high, 2)}"
        )
        text += f", of {number(self.counts[1])}: those that match “{clip(self.pattern, 80)}”" if self.pattern else ""
        text += f"; not finite in {clip(', '.join(self.bad), 120)}" if self.bad else ""
        for name, points in self.curves:
            values = [y for _, y in points]
            text += (
                f"; {name} {number(values[0])} at first, {number(values[-1])} at last, between "
                f"{number(min(values))} and {number(max(values))}"
            )
        text += f"; GradScaler left out {number(len(self.skipped))} of the steps drawn" if self.skipped else ""
        return text + (f"; clipped in {number(len(self.clipped))} of the steps drawn" if self.clipped else "") + "."


def read(data: Mapping[str, Any]) -> GradientMap | None:
    """The picture, or None when there is nothing in the data to draw.

    steps, layers, norms: of the map, norms as log10 or "zero", "nan", "inf"; losses, validation, scale: [[step, value],
    …]; totals: [[step, before, after clipping], …]; clipped, skipped: steps; table: rows of `TABLE`; the others are
    fields of GradientMap.
    """
    steps = tuple(s for s in _list(data, "steps") if isinstance(s, int))
    names, norms = _list(data, "layers"), _list(data, "norms")
    layers = tuple(
        (clean(name, 80), tuple(map(_cell, row)))
        for name, row in zip(names, norms)
        if isinstance(row, (list, tuple)) and len(row) == len(steps)
    )
    totals = _list(data, "totals")
    known = (
        ("loss", _points(_list(data, "losses"))),
        ("validation loss", _points(_list(data, "validation"))),
        ("gradient norm", _points(totals)),
        ("after clipping", _points(totals, 2)),
        ("loss scale", _points(_list(data, "scale"))),
    )
    clipped, skipped = (tuple(float(s) for s in _list(data, key) if _finite(s)) for key in ("clipped", "skipped"))
    curves = tuple((name, points) for name, points in known if points and (name != "after clipping" or clipped))
    if not curves and not (layers and steps):
        return None
    total, pattern, log = (data.get(key) for key in ("steps seen", "asked", "log"))
    drawn, of = (*(n for n in _list(data, "layer counts") if isinstance(n, int)), len(layers), len(layers))[:2]
    return GradientMap(
        steps,
        layers if steps else (),
        curves,
        clipped,
        total if isinstance(total, int) else len(steps),
        tuple(map(_row, _list(data, "table"))),
        (drawn, of),
        clean(pattern, 200) if isinstance(pattern, str) else None,
        log if isinstance(log, bool) else None,
        skipped,
    )


def _list(data: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = data.get(key)
    return value if isinstance(value, (list, tuple)) else ()


def _cell(value: Any) -> Any:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else "inf"
    return value if value in ("zero", "nan", "inf") else None


def _row(row: Any) -> tuple[Any, ...]:
    """A row of the table: a name, and five numbers or None."""
    values = [v if isinstance(v, numbers.Real) else None for v in row[1:]] if isinstance(row, (list, tuple)) else []
    return (clean(row[0], 80) if values else "", *(values + [None] * 5)[:5])


def _points(rows: Sequence[Any], column: int = 1) -> Points:
    return tuple(
        (float(row[0]), float(row[column]))
        for row in rows
        if isinstance(row, (list, tuple)) and len(row) > column and _finite(row[0]) and _finite(row[column])
    )


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and -1e300 < value < 1e300


def html(report: Report) -> str:
    """The picture alone, for the live view; a word while there is nothing to draw."""
    gradients = read(report.plot("gradients"))
    return image(gradients.drawing(), gradients.sentence()) if gradients else "<p>No step has been watched yet.</p>"


def _panel(curves: Sequence[tuple[str, Points]], frame: Panel) -> list[Mark]:
    """Up to two curves over their horizontal rules."""
    marks, x = frame.rules(3), float(LEFT)
    for (name, points), colour, dash in zip(curves, (VALUES, SECOND), ((), (5, 3))):
        label = name + " (logarithmic)" * (frame.up.log and colour == VALUES)
        marks.append(Text(x, frame.top - 9, label, colour=INK if len(curves) == 1 else colour))
        marks.append(curve(frame.places(points), colour, dash))
        x += 7 * len(label) + 16
    return marks


def _below(gradients: GradientMap, panel: str, frame: Panel) -> list[Mark]:
    """Clipped steps under the norm, or those that a scaler skipped under its scale, as short marks."""
    what = BELOW.get(panel, "")
    steps = {"clipped": gradients.clipped, "skipped": gradients.skipped}.get(what, ())
    if not steps:
        return []
    places = sorted({round(frame.x(step)) for step in steps})
    label = Text(RIGHT, frame.top - 9, f"| {number(len(steps))} {what}", "end")
    return [Lines([((x, frame.foot + 3), (x, frame.foot + 9)) for x in places]), label]


def _row_height(gradients: GradientMap) -> float:
    return min(14.0, max(5.0, 280 / len(gradients.layers)))


def _map(gradients: GradientMap, top: float) -> list[Mark]:
    """The norms of layers, a row each; names where there is room for them."""
    tall, steps = _row_height(gradients), gradients.steps
    first, last = (LEFT + gradients.across.at(step) * (RIGHT - LEFT) for step in (steps[0], steps[-1]))
    cells = [[gradients.colour(value) for value in row] for _, row in gradients.layers]
    marks: list[Mark] = [
        Text(LEFT, top - 7, gradients.title()),
        Pixels(first, top, max(3.0, last - first), tall * len(cells), cells),
    ]
    apart, bad = max(1, round(10.5 / tall + 0.4)), set(gradients.bad)
    for place, (name, _) in enumerate(gradients.layers):
        if place % apart == 0 or name in bad:
            y, colour = top + tall * (place + 0.5) + 3.5, FAULT if name in bad else INK
            marks.append(Text(LEFT - 8, y, clip_start(name, 22), "end", colour, size=10))
    return marks


def _legend(gradients: GradientMap, top: float) -> list[Mark]:
    """What the colours mean."""
    if not gradients.layers:
        return []
    low, high = gradients.span
    lowest = "0" if gradients.log is False else figures(10**low, 2)
    marks: list[Mark] = [Text(LEFT + 42, top + 9, lowest, "end", size=10)]
    marks += [Bar(LEFT + 48 + 5 * place, top, 5.3, 10, colour) for place, colour in enumerate(PALETTE)]
    x = LEFT + 54 + 5 * len(PALETTE)
    marks.append(Text(x, top + 9, figures(10**high, 2), size=10))
    if gradients.bad:
        names = clip(", ".join(gradients.bad), 40)
        marks.append(Text(x + 52, top + 9, f"red: not finite in {names}", colour=FAULT, size=10))
    return marks
