"""Where memory is: a bar for each part, and live bytes over the events of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from nbdebug.text import UNITS, size
from nbdebug.views.plots.axes import Points
from nbdebug.views.plots.marks import (
    FAINT,
    FAULT,
    INK,
    RULE,
    SECOND,
    VALUES,
    WIDTH,
    Areas,
    Bar,
    Dot,
    Drawing,
    Mark,
    Text,
    curve,
    line,
)
from nbdebug.views.wording import clean

LEFT, RIGHT, TOP, ROW, TALL = 170, 86, 26, 20, 110
EDGE = 74
"""Left of the course: its numbers are short, the parts' names are not."""
MOST = 9
"""Bars; what is left is one more."""
COLOURS = (VALUES, SECOND, "#5f9a5a", "#9a6fb0", "#c0645c", "#4f9c9c", "#8a8a3a", "#7a7f8c", "#a8785f", INK)


@dataclasses.dataclass(frozen=True)
class MemoryPlot:
    """parts: label and bytes, as drawn; total: of all of them; limit: what there is, or None; course: (event, bytes);
    phases: where each begins; title, axis: of the course."""

    parts: tuple[tuple[str, int], ...]
    total: int
    limit: int | None
    course: Points
    phases: tuple[tuple[str, float], ...]
    title: str
    axis: str

    @property
    def peak(self) -> tuple[float, float]:
        """The event at which most was alive, and the bytes."""
        return max(self.course, key=lambda point: point[1])

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        words = [self.heading()]
        words += [f"{label} {size(count)}" for label, count in self.parts]
        if self.course:
            words.append(
                f"{size(self.course[0][1])} at the start, {size(self.peak[1])} at the peak, "
                f"{size(self.course[-1][1])} at the end"
            )
        return "; ".join(words) + "."

    def drawing(self) -> Drawing:
        marks, foot = _parts(self)
        if self.course:
            marks += _course(self, foot + 34)
            foot += 34 + TALL + 36
        return Drawing(marks, foot + 8)

    def heading(self) -> str:
        return f"{self.title}: {size(self.total)}" + (f" of {size(self.limit)}" if self.limit else "")

    def ticks(self, most: int = 4) -> list[float]:
        """Round numbers of bytes up to the top of the course, in binary units."""
        top = self.peak[1]
        if top <= 0:
            return [0.0]
        unit = 1.0
        while top / unit >= 1024 and unit < 1024.0 ** (len(UNITS) - 1):
            unit *= 1024
        apart = next(k for k in (1, 2, 5, 10, 20, 50, 100, 200, 250, 500, 1024) if top / (unit * k) <= most) * unit
        if top / apart < 1.5:
            apart /= 4
        return [n * apart for n in range(int(top / apart) + 1)]


def read(data: Mapping[str, Any]) -> MemoryPlot | None:
    """The picture, or None when there is nothing in the data to draw.

    parts: [[label, bytes], …]; total, limit: bytes; course: [[event, bytes], …]; events: {phase: where it begins};
    title, axis: text.
    """
    parts = [
        (clean(label, 40), int(count)) for label, count in _pairs(data.get("parts")) if _number(count) and count > 0
    ]
    course = tuple((float(x), float(y)) for x, y in _pairs(data.get("course")) if _number(x) and _number(y))
    if not parts and len(course) < 2:
        return None
    if len(parts) > MOST + 1:
        parts = [*parts[:MOST], (f"{len(parts) - MOST} others", sum(count for _, count in parts[MOST:]))]
    total, limit = data.get("total"), data.get("limit")
    phases = data.get("events")
    starts = (
        tuple((clean(name, 24), float(at)) for name, at in phases.items() if _number(at))
        if isinstance(phases, Mapping)
        else ()
    )
    return MemoryPlot(
        tuple(parts),
        int(total) if _number(total) else sum(count for _, count in parts),
        int(limit) if _number(limit) and limit > 0 else None,
        course if len(course) > 1 else (),
        starts,
        clean(data.get("title") or "Memory", 80),
        clean(data.get("axis") or "allocations", 40),
    )


def _pairs(value: Any) -> Sequence[Any]:
    pairs = value if isinstance(value, (list, tuple)) else ()
    return [p for p in pairs if isinstance(p, (list, tuple)) and len(p) == 2]


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def _parts(memory: MemoryPlot) -> tuple[list[Mark], int]:
    """The bars and where they end. All share one scale: the limit, or the total."""
    whole = max(memory.limit or 0, memory.total, 1)
    scale, y = (WIDTH - LEFT - RIGHT) / whole, TOP
    over = memory.limit is not None and memory.total > memory.limit
    title = memory.heading() + ", more than there is" * over
    marks: list[Mark] = [Text(0, 14, title, colour=FAULT if over else INK, bold=True)]
    for (label, number), colour in zip(memory.parts, COLOURS):
        wide = max(1.0, scale * number)
        marks += [
            Text(LEFT - 10, y + 12, label, "end"),
            Bar(LEFT, y + 2, wide, 12, colour),
            Text(LEFT + wide + 7, y + 12, size(number)),
        ]
        y += ROW
    if memory.limit:  # all parts in one bar, one after the other: what has to fit under the limit
        marks.append(Text(LEFT - 10, y + 12, "in all", "end", bold=True))
        x = float(LEFT)
        for (_, number), colour in zip(memory.parts, COLOURS):
            marks.append(Bar(x, y + 2, scale * number, 12, colour))
            x += scale * number
        marks.append(Text(x + 7, y + 12, size(memory.total)))
        y += ROW
        x = LEFT + scale * memory.limit
        marks += [
            line(x, TOP - 4, x, y, FAULT if over else INK, (4, 3)),
            Text(x, y + 12, f"limit {size(memory.limit)}", "end" if x > WIDTH - 90 else "middle"),
        ]
        y += 16
    return marks, y


def _course(memory: MemoryPlot, top: float) -> list[Mark]:
    first, last, high = memory.course[0][0], memory.course[-1][0], 1.18 * max(memory.peak[1], 1.0)
    foot, right = top + TALL, WIDTH - 12

    def place(x: float, y: float) -> tuple[float, float]:
        return EDGE + (right - EDGE) * (x - first) / max(last - first, 1e-9), foot - TALL * y / high

    marks: list[Mark] = [Text(EDGE, top - 12, f"live memory over one step, by {memory.axis}")]
    for value in memory.ticks():
        y = place(first, value)[1]
        marks += [line(EDGE, y, right, y, RULE), Text(EDGE - 8, y + 4, size(value) if value else "0", "end")]
    path = [place(*point) for point in memory.course]
    marks += [Areas([[(EDGE, foot), *path, (right, foot)]], VALUES + "47"), curve(path)]
    free = 0.0  # where the next name can begin without running into the one before
    for name, at in memory.phases:
        x = place(at, 0)[0]
        marks.append(line(x, top - 4, x, foot, INK, (3, 3)))
        if x >= free:
            marks.append(Text(x + 3, foot + 15, name))
            free = x + 8 + 6.5 * len(name)
    x, y = place(*memory.peak)
    late = x > WIDTH - 150
    return [
        *marks,
        line(EDGE, foot, right, foot, FAINT),
        Dot(x, y, 3.2, FAULT),
        Text(x - 7 if late else x + 7, y - 5, f"peak {size(memory.peak[1])}", "end" if late else "start", FAULT, True),
    ]
