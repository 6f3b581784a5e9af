"""Losses that belong beside each other: of a run as it is and with the fix, and on fixed batches along the run.

`read` takes the plain facts of a report and gives a Curves: what the SVG, the figure and the text all show.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from nbdebug.views.plots.histogram import FAULT, INK, VALUES
from nbdebug.views.plots.run import FAINT_INK as FAINT
from nbdebug.views.plots.run import (
    FIGURE_INK,
    GAP,
    TOP,
    Points,
    RunScale,
    across_at,
    axis,
    embedded,
    line,
    points_of,
    quiet,
    rules,
    sheet,
    text,
)
from nbdebug.views.wording import TextTable, clean, number

MOST = 4
"""Curves of a panel."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """points: (step, loss), finite, at least one. broke: the first step at which the loss was not finite."""

    name: str
    points: Points
    broke: float | None = None

    @property
    def lowest(self) -> tuple[float, float]:
        return min(self.points, key=lambda point: point[1])

    @property
    def start(self) -> str:
        return number(self.points[0][1])

    @property
    def end(self) -> str:
        return number(self.points[-1][1]) if self.broke is None else f"not finite from step {number(int(self.broke))}"

    @property
    def label(self) -> str:
        """What stands beside the curve."""
        return self.name if self.broke is None else f"{self.name} ×"

    def sentence(self) -> str:
        step, value = self.lowest
        ends = f"at last {self.end}" if self.broke is None else self.end
        return f"{self.name}: {self.start} at first, {ends}, lowest {number(value)} at step {number(int(step))}"


@dataclasses.dataclass(frozen=True)
class CurvePanel:
    """Curves over one scale."""

    name: str
    curves: tuple[Curve, ...]

    @functools.cached_property
    def scale(self) -> RunScale:
        return RunScale.around([y for curve in self.curves for _, y in curve.points])


@dataclasses.dataclass(frozen=True)
class Curves:
    """Panels over the same steps."""

    panels: tuple[CurvePanel, ...]

    @functools.cached_property
    def across(self) -> RunScale:
        steps = [x for panel in self.panels for curve in panel.curves for x, _ in curve.points]
        return RunScale.of_steps(min(steps), max(steps))

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        said = [f"{panel.name}, {'; '.join(curve.sentence() for curve in panel.curves)}" for panel in self.panels]
        return "; ".join(said) + "."

    def table(self) -> TextTable:
        """Start, end and lowest of each curve."""
        rows = []
        for panel in self.panels:
            for curve in panel.curves:
                step, value = curve.lowest
                rows.append((curve.name, curve.start, curve.end, f"{number(value)} (step {number(int(step))})"))
        return TextTable("", ("Loss", "Start", "End", "Lowest"), tuple(rows))


def read(data: Mapping[str, Any]) -> Curves | None:
    """The curves, or None when there is nothing in them to draw.

    curves: name → list of [step, loss], None for a loss that was not finite; "curves of" says whose losses they are.
    checkups: a list of {"step", "training", "validation"}.
    """
    said = data.get("curves of")
    panels = [
        CurvePanel(clean(said, 60) if isinstance(said, str) else "loss of each step", _named(data.get("curves"))),
        CurvePanel("loss of the run as it is, on fixed batches in eval mode", _checkups(data.get("checkups"))),
    ]
    drawn = tuple(panel for panel in panels if panel.curves)
    return Curves(drawn) if drawn else None


def _named(given: Any) -> tuple[Curve, ...]:
    pairs = list(given.items())[:MOST] if isinstance(given, Mapping) else []
    found = [(clean(name, 30), points_of(rows), _broke(rows)) for name, rows in pairs]
    return tuple(Curve(name, points, broke) for name, points, broke in found if points)


def _broke(rows: Any) -> float | None:
    """The step from which on no loss was finite."""
    pairs = [r for r in rows if isinstance(r, (list, tuple)) and len(r) == 2] if isinstance(rows, (list, tuple)) else []
    if not pairs or pairs[-1][1] is not None:
        return None
    tail = len(pairs)
    while tail and pairs[tail - 1][1] is None:
        tail -= 1
    at = points_of([(pairs[tail][0], 0)])
    return at[0][0] if at else None


def _checkups(given: Any) -> tuple[Curve, ...]:
    rows = [r for r in given if isinstance(r, Mapping)] if isinstance(given, (list, tuple)) else []
    found = [
        (f"on {key} batches", points_of([(r.get("step"), r.get(key)) for r in rows]))
        for key in ("training", "validation")
    ]
    return tuple(Curve(name, points) for name, points in found if len(points) > 1)


COLOURS = (VALUES, "#b97a3c", "#388c5e", INK)
"""In this order; each has a contrast of at least 3.4 to white and to #212121."""
DASHES = ("", "5 3", "2 2", "8 3 2 3")
RIGHT, TALL, APART = 150, 104, 13
"""Margin for the names, height of a panel, distance between names; in pixels."""


def image(curves: Curves) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    return embedded(svg(curves), curves.sentence())


def svg(curves: Curves) -> str:
    drawn: list[str] = []
    for place, panel in enumerate(curves.panels):
        drawn += _panel(panel, curves.across, TOP + place * (TALL + GAP))
    foot = TOP + len(curves.panels) * (TALL + GAP) - GAP
    return sheet([*drawn, *axis(curves.across, foot, "step", RIGHT)], foot + 36)


def _panel(panel: CurvePanel, across: RunScale, top: float) -> list[str]:
    drawn = rules(panel.name, panel.scale, top, TALL, RIGHT)
    ends = []
    for curve, colour, dash in zip(panel.curves, COLOURS, DASHES):
        places = [(across_at(across, x, RIGHT), top + TALL * (1 - panel.scale.at(y))) for x, y in curve.points]
        drawn.append(line(places, colour, dash))
        drawn += [_cross(*places[-1])] * (curve.broke is not None)
        ends.append(places[-1])
    heights = apart([y for _, y in ends], APART, top + 4, top + TALL - 8)  # no name stands on the axis
    for curve, colour, (x, _), y in zip(panel.curves, COLOURS, ends, heights):
        drawn.append(text(x + 9, y + 4, curve.label, "start", colour))
    return drawn


def _cross(x: float, y: float) -> str:
    return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{FAULT}" stroke-width="1.8" fill="none"/>'


def apart(places: list[float], least: float, low: float, high: float) -> list[float]:
    """The same places, moved as little as it takes to stand `least` apart, from `low` to `high`."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, now in zip([None, *order], order):
        floor = low if before is None else moved[before] + least
        moved[now] = max(moved[now], floor)
    ceiling = high
    for now in reversed(order):
        moved[now] = min(moved[now], ceiling)
        ceiling = moved[now] - least
    return moved


STYLES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))


def tall(curves: Curves) -> float:
    """Inches that the picture wants."""
    return 0.5 + 1.9 * len(curves.panels)


def draw(figure: Any, curves: Curves) -> None:
    """Draw into a figure or a part of one."""
    rows = figure.subplots(len(curves.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, curves.panels):
        _figure_panel(axes, panel)
    whole = [value for value, _ in curves.across.ticks(8) if value == int(value)]
    rows[-1].set_xticks(whole, [number(int(value)) for value in whole])
    rows[-1].set_xlim(curves.across.low, curves.across.high)
    rows[-1].set_xlabel("step", fontsize=8.5, color=FIGURE_INK)


def _figure_panel(axes: Any, panel: CurvePanel) -> None:
    quiet(axes)
    scale, ends = panel.scale, []
    for curve, colour, style in zip(panel.curves, COLOURS, STYLES):
        heights = [scale.at(y) for _, y in curve.points]
        axes.plot(
            [x for x, _ in curve.points],
            heights,
            color=colour,
            linestyle=style,
            linewidth=1.3,
            marker="o" * (len(heights) == 1) or None,
        )
        if curve.broke is not None:
            axes.plot(
                curve.points[-1][0], heights[-1], "x", color=FAULT, markersize=7, markeredgewidth=2, clip_on=False
            )
        ends.append(heights[-1])
    for curve, colour, height in zip(panel.curves, COLOURS, apart(ends, 0.12, 0.04, 1.0)):
        axes.annotate(
            curve.label,
            (curve.points[-1][0], height),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
            parse_math=False,
        )
    ticks = scale.ticks()
    axes.set_yticks([scale.at(value) for value, _ in ticks], [said for _, said in ticks])
    axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.8)
    axes.set_ylim(-0.04, 1.04)
    axes.set_title(
        panel.name + " (logarithmic)" * scale.log,
        loc="left",
        fontsize=9.5,
        color=FIGURE_INK,
        pad=6,
        parse_math=False,
    )
