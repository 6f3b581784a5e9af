"""Modules against the ends of a half precision type: a line for each module, from its smallest value to its largest, in
powers of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from nbdebug.text import clip_start, count
from nbdebug.views.plots.histogram import SPANS, Span
from nbdebug.views.plots.marks import FAULT, INK, SECOND, VALUES, WIDTH, Bar, Dot, Drawing, Mark, Text, line
from nbdebug.views.wording import clean, number

LEFT, RIGHT, TOP, ROW = 150, WIDTH - 108, 40, 17
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST = 28
"""Modules that are drawn: the kept ones, and those that come nearest to an end."""


@dataclasses.dataclass(frozen=True)
class RangeLine:
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
    lines: tuple[RangeLine, ...]
    more: int

    @property
    def window(self) -> tuple[float, float]:
        """The powers of two that are nearest: all lines, and both ends of the type where they are near."""
        lows = [line.low for line in self.lines] + [g for line in self.lines if (g := line.gradient) is not None]
        highs = [line.high for line in self.lines]
        low, high = min(lows), max(highs)
        low = min(low, max(self.span.normal, low - 30.0))
        high = max(high, min(self.span.largest + 1.0, high + 30.0))
        return low - 2, high + 2

    def drawing(self) -> Drawing:
        low, high = self.window
        foot = TOP + ROW * len(self.lines)

        def x(power: float) -> float:
            return LEFT + (RIGHT - LEFT) * (min(max(power, low), high) - low) / (high - low)

        title = f"Sizes of each module's values, against what {self.dtype} can hold"
        marks: list[Mark] = [Text(0, 13, title, bold=True)]
        for power, end in (
            (self.span.largest + 1.0, f"end of {self.dtype}: {self.span.most}"),
            (float(self.span.normal), "fewer digits below"),
        ):
            if low <= power <= high:
                at = x(power)
                anchor = "start" if power > 0 and at < WIDTH - 7 * len(end) else "end"  # each on its own side
                marks += [line(at, TOP - 6, at, foot + 4, INK, (4, 3)), Text(at, TOP - 11, end, anchor)]
        for row, module in enumerate(self.lines):
            y, colour = TOP + ROW * row + 9, FAULT if module.kept else VALUES
            wide = max(2.0, x(module.high) - x(module.low))
            name = Text(
                LEFT - 10, y + 4, clip_start(module.name, 21), "end", FAULT if module.kept else INK, module.kept
            )
            marks += [name, Bar(x(module.low), y - 4, wide, 8, colour + "bf")]
            marks += [Dot(x(module.gradient), y, 3, SECOND)] if module.gradient is not None else []
            marks += [Text(RIGHT + 8, y + 4, "kept in float32", colour=FAULT, bold=True)] if module.kept else []
        return Drawing([*marks, *self._axis(x, foot)], foot + 44)

    def _axis(self, x: Callable[[float], float], foot: float) -> list[Mark]:
        low, high = self.window
        apart = next(k for k in (2, 4, 5, 10, 20, 50, 100, 200, 1000) if (high - low) / k <= 9)
        marks: list[Mark] = [line(LEFT, foot + 4, RIGHT, foot + 4)]
        for power in range(int(-(-low // apart)) * apart, int(high) + 1, apart):
            label = f"2{str(power).translate(SUPERSCRIPT)}"
            marks += [line(x(power), foot + 4, x(power), foot + 8), Text(x(power), foot + 21, label, "middle")]
        legend = []
        if any(module.gradient is not None for module in self.lines):
            marks.append(Dot(LEFT + 4, foot + 35, 3, SECOND))
            legend.append("largest gradient that reached the module")
        if self.more:
            legend.append(f"{count(self.more, 'module')} far from the ends left out")
        return [*marks, Text(LEFT + 13, foot + 39, "; ".join(legend))] if legend else marks

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        top = max(self.lines, key=lambda line: line.high)
        kept = [line.name for line in self.lines if line.kept]
        text = (
            f"Sizes of the values of {number(len(self.lines))} modules against {self.dtype}, which ends at "
            f"2^{self.span.largest + 1}: the largest is 2^{top.high:.1f}, in {top.name}"
        )
        return text + (f"; kept in float32: {', '.join(kept[:8])}" if kept else "") + "."


def read(data: Mapping[str, Any]) -> Ranges | None:
    """The picture, or None when there is nothing in the data to draw.

    dtype; modules: [{"name", "values": [low, high], "gradient", "kept"}, …], sizes as powers of two.
    """
    if data.get("dtype") not in SPANS:
        return None
    span = SPANS[data["dtype"]]
    modules = data.get("modules")
    lines = [
        line for m in (modules if isinstance(modules, (list, tuple)) else ()) if (line := _range_line(m)) is not None
    ]
    if not lines:
        return None
    near = sorted(lines, key=lambda line: (not line.kept, min(span.largest + 1 - line.high, line.low - span.normal)))
    nearest = set(map(id, near[:MOST]))
    return Ranges(data["dtype"], span, tuple(line for line in lines if id(line) in nearest), len(lines) - len(nearest))


def _range_line(data: Any) -> RangeLine | None:
    if not isinstance(data, Mapping):
        return None
    values, gradient = data.get("values"), data.get("gradient")
    if not isinstance(values, (list, tuple)) or len(values) != 2 or not all(map(_number, values)):
        return None
    name = clean(data.get("name") or "the model", 60)
    return RangeLine(
        name,
        float(values[0]),
        float(values[1]),
        float(gradient) if _number(gradient) else None,
        data.get("kept") is True,
    )


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e5 < value < 1e5
