"""Losses that belong beside each other: of a run as it is and with the fix, and on fixed batches along the run; and
what else runs over steps, such as the machine beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from nbdebug.views.plots.axes import Panel, Points, RunScale, points_of
from nbdebug.views.plots.marks import FAULT, INK, SECOND, VALUES, WIDTH, Drawing, Lines, Mark, Text, curve, line
from nbdebug.views.wording import TextTable, clean, number

LEFT, RIGHT, TOP, GAP = 66, WIDTH - 150, 24, 34
TALL, APART = 104, 13
"""Height of a panel, distance between names; in pixels. The right margin is for the names."""
COLOURS = (VALUES, SECOND, "#388c5e", INK)
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 3), (2, 2), (8, 3, 2, 3))
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
    """Curves over one scale. span: its ends, where they are known beforehand."""

    name: str
    curves: tuple[Curve, ...]
    span: tuple[float, float] | None = None

    @functools.cached_property
    def scale(self) -> RunScale:
        if self.span is not None:
            return RunScale(*self.span)
        return RunScale.around([y for loss in self.curves for _, y in loss.points])


@dataclasses.dataclass(frozen=True)
class Curves:
    """Panels over the same steps. marks: a place and its name, drawn through all panels."""

    panels: tuple[CurvePanel, ...]
    axis: str = "step"
    marks: tuple[tuple[float, str], ...] = ()

    @functools.cached_property
    def across(self) -> RunScale:
        steps = [x for panel in self.panels for loss in panel.curves for x, _ in loss.points]
        return RunScale.of_steps(min(steps), max(steps))

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        text = [f"{panel.name}, {'; '.join(loss.sentence() for loss in panel.curves)}" for panel in self.panels]
        return "; ".join(text) + "".join(f"; {name} at {number(int(place))}" for place, name in self.marks) + "."

    def drawing(self) -> Drawing:
        marks: list[Mark] = []
        for place, panel in enumerate(self.panels):
            frame = Panel(self.across, panel.scale, LEFT, RIGHT, TOP + place * (TALL + GAP), TALL)
            marks += [frame.head(panel.name), *frame.rules()]
            ends = []
            for loss, colour, dash in zip(panel.curves, COLOURS, DASHES):
                places = frame.places(loss.points)
                marks.append(curve(places, colour, dash))
                ends.append(places[-1])
                if loss.broke is not None:
                    x, y = places[-1]
                    cross = (((x - 4, y - 4), (x + 4, y + 4)), ((x + 4, y - 4), (x - 4, y + 4)))
                    marks.append(Lines(cross, FAULT, 1.8))
            heights = apart([y for _, y in ends], APART, frame.top + 4, frame.foot - 8)  # no name stands on the axis
            for loss, colour, (x, _), y in zip(panel.curves, COLOURS, ends, heights):
                marks.append(Text(x + 9, y + 4, loss.label, colour=colour))
        for at, name in self.marks:
            x = frame.x(at)
            marks += [line(x, TOP - 4, x, frame.foot, FAULT, (3, 3)), Text(x + 3, TOP + 8, name, colour=FAULT)]
        return Drawing([*marks, *frame.axis(self.axis)], frame.foot + 36)

    def table(self) -> TextTable:
        """Start, end and lowest of each curve."""
        rows = []
        for panel in self.panels:
            for loss in panel.curves:
                step, value = loss.lowest
                rows.append((loss.name, loss.start, loss.end, f"{number(value)} (step {number(int(step))})"))
        what = "Loss" if any("loss" in panel.name for panel in self.panels) else "Curve"
        return TextTable("", (what, "Start", "End", "Lowest"), tuple(rows))


def read(data: Mapping[str, Any]) -> Curves | None:
    """The curves, or None when there is nothing in them to draw.

    curves: name → list of [step, loss], None for a loss that was not finite; "curves of" says whose losses they are.
    checkups: a list of {"step", "training", "validation"}. panels: further ones, name → curves; axis: what runs along
    them; marks: [[place, name], …].
    """
    text = data.get("curves of")
    panels = [
        CurvePanel(clean(text, 60) if isinstance(text, str) else "loss of each step", _named(data.get("curves"))),
        CurvePanel("loss of the run as it is, on fixed batches in eval mode", _checkups(data.get("checkups"))),
    ]
    more = data.get("panels")
    if isinstance(more, Mapping):
        percent = {name: (0.0, 100.0) for name in more if str(name).endswith("percent")}
        named = [(name, _named(curves)) for name, curves in list(more.items())[:6]]
        panels += [CurvePanel(clean(name, 60), curves, percent.get(name)) for name, curves in named]
    drawn = tuple(panel for panel in panels if panel.curves)
    pairs = data.get("marks")
    pairs = pairs[:20] if isinstance(pairs, (list, tuple)) else ()
    marks = tuple((place, clean(pair[1], 30)) for pair in pairs for place, _ in points_of([(pair[0], 0)]))
    return Curves(drawn, clean(data.get("axis") or "step", 20), marks) if drawn else None


def _named(value: Any) -> tuple[Curve, ...]:
    pairs = list(value.items())[:MOST] if isinstance(value, Mapping) else []
    curves = [(clean(name, 30), points_of(rows), _broke(rows)) for name, rows in pairs]
    return tuple(Curve(name, points, broke) for name, points, broke in curves if points)


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


def _checkups(value: Any) -> tuple[Curve, ...]:
    rows = [r for r in value if isinstance(r, Mapping)] if isinstance(value, (list, tuple)) else []
    curves = [
        (f"on {key} batches", points_of([(r.get("step"), r.get(key)) for r in rows]))
        for key in ("training", "validation")
    ]
    return tuple(Curve(name, points) for name, points in curves if len(points) > 1)


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
