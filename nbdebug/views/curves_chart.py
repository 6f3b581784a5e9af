"""Losses beside each other as an SVG inside an <img>: each curve named at its end, the second one dashed as well.

Ground and colours as in `chart.py`; a cross is where a loss stopped being finite.
"""

from __future__ import annotations

from nbdebug.views.chart import FAULT, INK, VALUES
from nbdebug.views.course import Scale
from nbdebug.views.course_chart import GAP, TOP, across_at, axis, embedded, line, rules, sheet, text
from nbdebug.views.curves import Curves, Panel

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


def _panel(panel: Panel, across: Scale, top: float) -> list[str]:
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
