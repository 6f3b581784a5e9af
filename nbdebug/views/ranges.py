"""Modules against the ends of a half precision type, as the SVG and the figure draw it: a line for each module, from
its smallest value to its largest, in powers of two.

`read` takes the plain facts of a report and gives a Ranges, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeGuard

from nbdebug.views.exponents import SPANS, Span
from nbdebug.views.words import clean, number

MOST = 28
"""Modules that are drawn: the kept ones, and those that come nearest to an end."""


@dataclasses.dataclass(frozen=True)
class Line:
    """name; low, high: powers of two; gradient: of the largest that reached it, or None; kept: in float32."""

    name: str
    low: float
    high: float
    gradient: float | None
    kept: bool


@dataclasses.dataclass(frozen=True)
class Ranges:
    """lines: in the model's order; more: how many were left out; span: the type's own ends."""

    dtype: str
    span: Span
    lines: tuple[Line, ...]
    more: int

    @property
    def window(self) -> tuple[float, float]:
        """The powers of two that are shown: all lines, and both ends of the type where they are near."""
        lows = [line.low for line in self.lines] + [g for line in self.lines if (g := line.gradient) is not None]
        highs = [line.high for line in self.lines]
        low, high = min(lows), max(highs)
        low = min(low, max(self.span.normal, low - 30.0))
        high = max(high, min(self.span.largest + 1.0, high + 30.0))
        return low - 2, high + 2

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        top = max(self.lines, key=lambda line: line.high)
        kept = [line.name for line in self.lines if line.kept]
        said = (
            f"Sizes of the values of {number(len(self.lines))} modules against {self.dtype}, which ends at "
            f"2^{self.span.largest + 1}: the largest is 2^{top.high:.1f}, in {top.name}"
        )
        return said + (f"; kept in float32: {', '.join(kept[:8])}" if kept else "") + "."


def read(facts: Mapping[str, Any]) -> Ranges | None:
    """The Ranges of `facts["ranges"]`, or None when there is nothing in it to draw."""
    given = facts.get("ranges")
    if not isinstance(given, Mapping) or given.get("dtype") not in SPANS:
        return None
    span = SPANS[given["dtype"]]
    modules = given.get("modules")
    lines = [line for m in (modules if isinstance(modules, (list, tuple)) else ()) if (line := _line(m)) is not None]
    if not lines:
        return None
    near = sorted(lines, key=lambda line: (not line.kept, min(span.largest + 1 - line.high, line.low - span.normal)))
    shown = set(map(id, near[:MOST]))
    return Ranges(given["dtype"], span, tuple(line for line in lines if id(line) in shown), len(lines) - len(shown))


def _line(given: Any) -> Line | None:
    if not isinstance(given, Mapping):
        return None
    values, gradient = given.get("values"), given.get("gradient")
    if not isinstance(values, (list, tuple)) or len(values) != 2 or not all(map(_number, values)):
        return None
    name = clean(given.get("name") or "the model", 60)
    return Line(
        name,
        float(values[0]),
        float(values[1]),
        float(gradient) if _number(gradient) else None,
        given.get("kept") is True,
    )


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e5 < value < 1e5
