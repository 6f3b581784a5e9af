"""Where a step's time goes: a bar for each part, its median beside it, and the spread of the steps as a thin line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.text import clip, duration, percent
from nbdebug.views.plots.marks import FAULT, INK, VALUES, WIDTH, Bar, Drawing, Mark, Text, line
from nbdebug.views.wording import clean

LEFT, RIGHT, TOP, ROW, CELLS = 130, 130, 26, 20, 24


@dataclasses.dataclass(frozen=True)
class StepPart:
    """Seconds: the median of the steps, and the ends of their middle half. share: of the time of all steps."""

    name: str
    median: float
    low: float
    high: float
    share: float


@dataclasses.dataclass(frozen=True)
class TimesPlot:
    """title: a sentence with the whole step; slow: the name of the part that is at fault, or ""."""

    title: str
    parts: tuple[StepPart, ...]
    slow: str

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        return f"{self.title}: " + ", ".join(f"{part.name} {percent(part.share)}" for part in self.parts) + "."

    def lines(self) -> list[str]:
        """The bars as text."""
        wide = max(len(part.name) for part in self.parts)
        return [f"  {self.title}"] + [
            f"  {part.name:{wide}}  {percent(part.share):>5}  median {duration(part.median):>9}  "
            + "█" * max(round(CELLS * part.share), 1)
            for part in self.parts
        ]

    def drawing(self) -> Drawing:
        scale, y = WIDTH - LEFT - RIGHT, TOP
        marks: list[Mark] = [Text(0, 14, self.title, bold=True)]
        whole = sum(part.median for part in self.parts) or 1.0
        for part in self.parts:
            wide = max(1.0, scale * part.share)
            ends = [LEFT + min(scale * value / whole, float(scale)) for value in (part.low, part.high)]
            marks += [
                Text(LEFT - 10, y + 12, part.name, "end"),
                Bar(LEFT, y + 2, wide, 12, FAULT if part.name == self.slow else VALUES),
                line(ends[0], y + 8, ends[1], y + 8, INK),
                Text(
                    LEFT + max(wide, ends[1] - LEFT) + 7,
                    y + 12,
                    f"{percent(part.share)}, median {duration(part.median)}",
                ),
            ]
            y += ROW
        return Drawing(marks, y + 8)


def read(data: Mapping[str, Any]) -> TimesPlot | None:
    """The picture, or None when there is nothing in the data to draw.

    title: text; parts: [[name, median, low, high, share], …]; slow: a name of these.
    """
    rows = data.get("parts")
    parts = []
    for row in rows if isinstance(rows, (list, tuple)) else ():
        if isinstance(row, (list, tuple)) and len(row) == 5 and all(_number(value) for value in row[1:]):
            parts.append(StepPart(clean(row[0], 24), *(float(value) for value in row[1:])))
    if not parts:
        return None
    return TimesPlot(clip(clean(data.get("title") or "A step", 90), 90), tuple(parts), str(data.get("slow") or ""))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
