"""Losses that belong beside each other: of a run as it is and with the fix, and on fixed batches along the run.

`read` takes the plain facts of a report and gives a Curves: what the SVG, the figure and the text all show.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from nbdebug.views.course import Points, Scale, points_of
from nbdebug.views.words import Table, clean, number

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
class Panel:
    """Curves over one scale."""

    name: str
    curves: tuple[Curve, ...]

    @functools.cached_property
    def scale(self) -> Scale:
        return Scale.around([y for curve in self.curves for _, y in curve.points])


@dataclasses.dataclass(frozen=True)
class Curves:
    """Panels over the same steps."""

    panels: tuple[Panel, ...]

    @functools.cached_property
    def across(self) -> Scale:
        steps = [x for panel in self.panels for curve in panel.curves for x, _ in curve.points]
        return Scale.of_steps(min(steps), max(steps))

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        said = [f"{panel.name}, {'; '.join(curve.sentence() for curve in panel.curves)}" for panel in self.panels]
        return "; ".join(said) + "."

    def table(self) -> Table:
        """Start, end and lowest of each curve."""
        rows = []
        for panel in self.panels:
            for curve in panel.curves:
                step, value = curve.lowest
                rows.append((curve.name, curve.start, curve.end, f"{number(value)} (step {number(int(step))})"))
        return Table("", ("Loss", "Start", "End", "Lowest"), tuple(rows))


def read(facts: Mapping[str, Any]) -> Curves | None:
    """The Curves of `facts["curves"]` and `facts["checkups"]`, or None when there is nothing in them to draw.

    curves: name → list of [step, loss], None for a loss that was not finite; "curves of" says whose losses they are.
    checkups: a list of {"step", "training", "validation"}.
    """
    said = facts.get("curves of")
    panels = [
        Panel(clean(said, 60) if isinstance(said, str) else "loss of each step", _named(facts.get("curves"))),
        Panel("loss of the run as it is, on fixed batches in eval mode", _checkups(facts.get("checkups"))),
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
