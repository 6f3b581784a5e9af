"""Scales, and the axes, rules and curves of pictures that run over steps: `run`, `losses`, `gradients`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from nbdebug.views.plots.marks import FAINT, RULE, Mark, Place, Text, line
from nbdebug.views.wording import number

_LARGEST, _SMALLEST = 1e300, 1e-300  # beyond them, sums and powers may overflow
Points = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class RunScale:
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
    def of_steps(cls, first: float, last: float) -> RunScale:
        """The scale of an axis of steps, with room for one at the least."""
        wide = max(1.0, abs(first) * 1e-9)  # one step is lost in a float above 2^53
        return cls(first, max(last, first + wide))

    @classmethod
    def around(cls, values: Sequence[float]) -> RunScale:
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


class LogScale(RunScale):
    """A logarithmic scale where the values span little, too: its ticks are then no powers of ten."""

    def _powers(self, most: int) -> list[float]:
        ticks = super()._powers(most)
        if len(ticks) < 2:
            power = math.floor(math.log10(self.low))
            ticks = [v for n in range(3) for k in (1, 2, 5) if self.low <= (v := k * 10.0 ** (power + n)) <= self.high]
        return ticks if len(ticks) > 1 else [v for v in self._even(most) if v >= self.low]


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel from left to right and top to foot, in pixels: steps run along `across`, values along `up`."""

    across: RunScale
    up: RunScale
    left: float
    right: float
    top: float
    tall: float

    @property
    def foot(self) -> float:
        return self.top + self.tall

    def x(self, step: float) -> float:
        return self.left + self.across.at(step) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.foot - self.tall * self.up.at(value)

    def places(self, points: Sequence[Place]) -> list[Place]:
        return [(self.x(step), self.y(value)) for step, value in points]

    def head(self, name: str) -> Text:
        return Text(self.left, self.top - 9, name + " (logarithmic)" * self.up.log)

    def rules(self, most: int = 4) -> list[Mark]:
        """Horizontal lines, each with its value."""
        marks: list[Mark] = []
        for value, label in self.up.ticks(most):
            y = self.y(value)
            marks += [line(self.left, y, self.right, y, RULE), Text(self.left - 8, y + 4, label, "end")]
        return marks

    def axis(self, name: str = "") -> list[Mark]:
        """The steps, along the foot."""
        marks: list[Mark] = [line(self.left, self.foot, self.right, self.foot)]
        for value, _ in self.across.ticks(6):
            if value == int(value):
                x = self.x(value)
                anchor = "end" if x > self.right - 20 else "middle"
                marks += [
                    line(x, self.foot, x, self.foot + 4, FAINT),
                    Text(x, self.foot + 17, number(int(value)), anchor),
                ]
        return [*marks, Text(self.right, self.foot + 31, name, "end")] if name else marks


# -- points out of plain data -----------------------------------------------------------------------------------------


def points_of(value: Any) -> Points:
    """The pairs (step, value) of a list that can be drawn, in the order of their steps."""
    pairs = value if isinstance(value, (list, tuple)) else ()
    return tuple(
        sorted(
            (_float(p[0]), _float(p[1]))
            for p in pairs
            if isinstance(p, (list, tuple)) and len(p) == 2 and _drawable(p[0]) and _drawable(p[1])
        )
    )


def places_of(value: Any) -> tuple[float, ...]:
    return tuple(sorted(_float(x) for x in value if _drawable(x))) if isinstance(value, (list, tuple)) else ()


def _drawable(value: Any) -> bool:
    return isinstance(value, numbers.Real) and (isinstance(value, int) or math.isfinite(value))


def _float(value: Any) -> float:
    return float(min(max(value, -_LARGEST), _LARGEST))
