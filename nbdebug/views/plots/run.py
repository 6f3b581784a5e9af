"""A run: losses and gradient norms over steps, with the steps marked in which a guard did something."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.text import count
from nbdebug.views.plots.axes import Panel, Points, RunScale, places_of, points_of
from nbdebug.views.plots.marks import FAULT, INK, WIDTH, Areas, Drawing, Lines, Mark, Text, curve, line
from nbdebug.views.wording import number

OUTCOMES = {
    "tripped": ("not finite, stopped", True),
    "skipped": ("not finite, dropped", True),
    "above": ("norm too large, dropped", False),
    "scaler": ("skipped by GradScaler", False),
}
"""What a mark means, and whether it is a fault; in the order in which they are named."""
LEFT, RIGHT, TOP, GAP = 66, WIDTH - 12, 24, 34
TALL = {"loss": 92, "gradient norm": 66}


@dataclasses.dataclass(frozen=True)
class RunPlot:
    """losses, norms: (step, value), finite, in order. marked: steps by outcome, one of OUTCOMES; counts: how many there
    were. runs: where a later run begins. joined: the steps are counted on from run to run."""

    losses: Points
    norms: Points
    marked: Mapping[str, tuple[float, ...]]
    counts: Mapping[str, int]
    runs: tuple[float, ...]
    first: float
    last: float
    steps: int
    joined: bool

    @property
    def panels(self) -> list[tuple[str, Points]]:
        """What is drawn one below the other."""
        return [(name, points) for name, points in (("loss", self.losses), ("gradient norm", self.norms)) if points]

    @property
    def across(self) -> RunScale:
        return RunScale.of_steps(self.first, self.last)

    @property
    def legend(self) -> list[tuple[str, str, bool]]:
        """The marks that there are: the outcome, what it means, whether it is a fault."""
        return [
            (key, f"{meaning}: {_at(self.marked[key], self.counts[key])}", fault)
            for key, (meaning, fault) in OUTCOMES.items()
            if self.marked.get(key)
        ]

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        text = count(self.steps, "step") + (f" in {len(self.runs) + 1} runs" if self.runs else "")
        for name, points in self.panels:
            values = [y for _, y in points]
            text += (
                f"; {name} {number(values[0])} at first, {number(values[-1])} at last, "
                f"between {number(min(values))} and {number(max(values))}"
            )
        return text + "".join(f"; {meaning}" for _, meaning, _ in self.legend) + "."

    def drawing(self) -> Drawing:
        marks: list[Mark] = []
        top = float(TOP)
        for name, points in self.panels:
            frame = Panel(self.across, RunScale.around([y for _, y in points]), LEFT, RIGHT, top, TALL[name])
            marks += [frame.head(name), *frame.rules(4 if frame.tall > 80 else 3), curve(frame.places(points))]
            top = frame.foot + GAP
        for start in self.runs:
            x = frame.x(start)
            marks += [line(x, TOP - 4, x, frame.foot, INK, (3, 3)), Text(x, TOP - 9, "new run", "middle")]
        axis = "steps, the runs one after another" if self.joined else "step"
        marks += frame.axis(axis)
        for row, (outcome, meaning, fault) in enumerate(self.legend):
            places = sorted({round(frame.x(step)) for step in self.marked[outcome]})  # no two in one column
            y = frame.foot + 46 + 18 * row
            marks += [
                _lines(places, TOP, frame.foot) if fault else _triangles(places, frame.foot),
                _lines([LEFT + 4], y - 10, y + 2) if fault else _triangles([LEFT + 4], y + 1),
                Text(LEFT + 16, y, meaning),
            ]
        return Drawing(marks, frame.foot + 36 + 18 * len(self.legend))


def _lines(places: Sequence[float], top: float, foot: float) -> Lines:
    return Lines([((x, top), (x, foot)) for x in places], FAULT, 1.5)


def _triangles(places: Sequence[float], foot: float) -> Areas:
    return Areas([((x - 4, foot), (x + 4, foot), (x, foot - 7)) for x in places])


def _at(steps: Sequence[float], total: int, most: int = 4) -> str:
    """ "step 7", "3 steps (7, 9, 12)", "40 steps (7, 9, 12, 15 …)"."""
    if total == 1:
        return f"step {number(int(steps[0]))}"
    listed = ", ".join(number(int(s)) for s in steps[:most])
    return f"{number(total)} steps ({listed}{' …' if total > most else ''})"


def read(data: Mapping[str, Any]) -> RunPlot | None:
    """The picture, or None when there is nothing in the data to draw.

    losses, norms: [[step, value], …]; marks: {outcome: [step, …]}; counts: {outcome: how many}; runs: [step, …]; steps:
    how many; joined: bool. What is none of these is left out.
    """
    losses, norms = points_of(data.get("losses")), points_of(data.get("norms"))
    places = [x for x, _ in (*losses, *norms)]
    if not places:
        return None
    marked = {key: steps for key in OUTCOMES if (steps := places_of(_member(data, "marks", key)))}
    counts = {key: _number(_member(data, "counts", key), len(steps)) for key, steps in marked.items()}
    places += [x for steps in marked.values() for x in steps]
    return RunPlot(
        losses,
        norms,
        marked,
        counts,
        places_of(data.get("runs")),
        min(places),
        max(places),
        _number(data.get("steps"), len(set(places))),
        data.get("joined") is True,
    )


def _member(data: Mapping[str, Any], key: str, name: str) -> Any:
    inside = data.get(key)
    return inside.get(name) if isinstance(inside, Mapping) else None


def _number(value: Any, least: int) -> int:
    return max(value, least) if isinstance(value, int) else least
