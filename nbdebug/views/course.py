"""The course of a run: losses and gradient norms over steps, with the steps marked in which a guard did something.

`read` takes the plain facts of a report and gives a Course: what the SVG chart and the matplotlib figure both draw.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.views.words import number

OUTCOMES = {
    "tripped": ("not finite, stopped", True),
    "skipped": ("not finite, dropped", True),
    "above": ("norm too large, dropped", False),
    "scaler": ("skipped by GradScaler", False),
}
"""What a mark means, and whether it is a fault; in the order in which they are named."""

_LARGEST, _SMALLEST = 1e300, 1e-300  # beyond them, sums and powers may overflow
Points = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Scale:
    """From a value to a height, 0 to 1. log: by the logarithm, where the values span more than a picture can."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            value, low, high = math.log(max(value, self.low)), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, most: int = 4) -> list[tuple[float, str]]:
        """The values to mark, each as a person writes it."""
        return [(value, number(value)) for value in (self._powers(most) if self.log else self._even(most))]

    def _powers(self, most: int) -> list[float]:
        low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**k for k in range(low, high + 1, math.ceil((high - low + 1) / most) or 1)]

    def _even(self, most: int) -> list[float]:
        apart = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        apart *= next((k for k in (1, 2, 5) if (self.high - self.low) / (apart * k) <= most), 10)
        first = math.ceil(self.low / apart - 1e-9)
        values = [(first + n) * apart for n in range(most + 2)]
        return [0.0 if abs(v) < apart / 2 else v for v in values if v <= self.high + apart * 1e-9]

    @classmethod
    def of_steps(cls, first: float, last: float) -> Scale:
        """The scale of an axis of steps, with room for one at the least."""
        wide = max(1.0, abs(first) * 1e-9)  # one step is lost in a float above 2^53
        return cls(first, max(last, first + wide))

    @classmethod
    def around(cls, values: Sequence[float]) -> Scale:
        """The scale on which all of these can be told apart."""
        low, high = min(values), max(values)
        if low > _SMALLEST and high / low > 20:
            return cls(_round(low, down=True), _round(high, down=False), True)
        air = max((high - low) * 0.06, abs(high) * 0.01, abs(low) * 0.01) or 1.0  # ticks have four digits
        return cls(0.0 if 0 <= low < air else low - air, high + air)


def _round(value: float, down: bool) -> float:
    """The nearest 1, 2 or 5 times a power of ten that is not above it (down), or not below it."""
    power = 10.0 ** math.floor(math.log10(value))
    return (
        max(k * power for k in (0.5, 1, 2, 5) if k * power <= value)
        if down
        else min(k * power for k in (1, 2, 5, 10, 20) if k * power >= value)
    )


@dataclasses.dataclass(frozen=True)
class Course:
    """losses, norms: (step, value), finite, in order. marks: steps by outcome, one of OUTCOMES; counts: how many there
    were. runs: where a later run begins. joined: the steps are counted on from run to run."""

    losses: Points
    norms: Points
    marks: Mapping[str, tuple[float, ...]]
    counts: Mapping[str, int]
    runs: tuple[float, ...]
    first: float
    last: float
    steps: int
    joined: bool

    @property
    def panels(self) -> list[tuple[str, Points, Scale]]:
        """What is drawn one below the other."""
        named = (("loss", self.losses), ("gradient norm", self.norms))
        return [(name, points, Scale.around([y for _, y in points])) for name, points in named if points]

    @property
    def across(self) -> Scale:
        return Scale.of_steps(self.first, self.last)

    @property
    def legend(self) -> list[tuple[str, str, bool]]:
        """The marks that there are: the outcome, what is said of it, whether it is a fault."""
        return [
            (key, f"{said}: {_at(self.marks[key], self.counts[key])}", fault)
            for key, (said, fault) in OUTCOMES.items()
            if self.marks.get(key)
        ]

    @property
    def axis(self) -> str:
        return "steps, the runs one after another" if self.joined else "step"

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        said = f"{number(self.steps)} step{'s' * (self.steps != 1)}"
        said += f" in {len(self.runs) + 1} runs" if self.runs else ""
        for name, points, _ in self.panels:
            values = [y for _, y in points]
            said += (
                f"; {name} {number(values[0])} at first, {number(values[-1])} at last, "
                f"between {number(min(values))} and {number(max(values))}"
            )
        return said + "".join(f"; {words}" for _, words, _ in self.legend) + "."


def _at(steps: Sequence[float], count: int, most: int = 4) -> str:
    """ "step 7", "3 steps (7, 9, 12)", "40 steps (7, 9, 12, 15 …)"."""
    if count == 1:
        return f"step {number(int(steps[0]))}"
    shown = ", ".join(number(int(s)) for s in steps[:most])
    return f"{number(count)} steps ({shown}{' …' if count > most else ''})"


def read(facts: Mapping[str, Any]) -> Course | None:
    """The Course of `facts["course"]`, or None when there is nothing in it to draw."""
    given = facts.get("course")
    if not isinstance(given, Mapping):
        return None
    losses, norms = points_of(given.get("losses")), points_of(given.get("norms"))
    places = [x for x, _ in (*losses, *norms)]
    if not places:
        return None
    marks = {key: steps for key in OUTCOMES if (steps := _steps(_member(given, "marks", key)))}
    counts = {key: _count(_member(given, "counts", key), len(steps)) for key, steps in marks.items()}
    places += [x for steps in marks.values() for x in steps]
    return Course(
        losses,
        norms,
        marks,
        counts,
        _steps(given.get("runs")),
        min(places),
        max(places),
        _count(given.get("steps"), len(set(places))),
        given.get("joined") is True,
    )


def _member(given: Mapping[str, Any], key: str, name: str) -> Any:
    inside = given.get(key)
    return inside.get(name) if isinstance(inside, Mapping) else None


def _count(given: Any, least: int) -> int:
    return max(given, least) if isinstance(given, int) else least


def points_of(given: Any) -> Points:
    """The pairs (step, value) of a list that can be drawn, in the order of their steps."""
    pairs = given if isinstance(given, (list, tuple)) else ()
    return tuple(
        sorted(
            (_float(p[0]), _float(p[1]))
            for p in pairs
            if isinstance(p, (list, tuple)) and len(p) == 2 and _drawable(p[0]) and _drawable(p[1])
        )
    )


def _steps(given: Any) -> tuple[float, ...]:
    return tuple(sorted(_float(x) for x in given if _drawable(x))) if isinstance(given, (list, tuple)) else ()


def _drawable(value: Any) -> bool:
    return isinstance(value, numbers.Real) and (isinstance(value, int) or math.isfinite(value))


def _float(value: Any) -> float:
    return float(min(max(value, -_LARGEST), _LARGEST))
