"""Where memory is, as the SVG and the figure draw it: a bar for each part, and live bytes over the events of a step.

`read` takes the plain facts of a report and gives a Memory, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from nbdebug.sizes import UNITS, size
from nbdebug.views.words import clean

MOST = 9
"""Bars; what is left is one more."""
COLOURS = ("#4d86c2", "#b97a3c", "#5f9a5a", "#9a6fb0", "#c0645c", "#4f9c9c", "#8a8a3a", "#7a7f8c", "#a8785f", "#808080")


@dataclasses.dataclass(frozen=True)
class Memory:
    """parts: label and bytes, as drawn; total: of all of them; limit: what there is, or None; course: (event, bytes);
    phases: where each begins; title, axis: of the course."""

    parts: tuple[tuple[str, int], ...]
    total: int
    limit: int | None
    course: tuple[tuple[float, float], ...]
    phases: tuple[tuple[str, float], ...]
    title: str
    axis: str

    @property
    def peak(self) -> tuple[float, float]:
        """The event at which most was alive, and the bytes."""
        return max(self.course, key=lambda point: point[1])

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        said = [f"{self.title}: {size(self.total)}" + (f" of {size(self.limit)}" if self.limit else "")]
        said += [f"{label} {size(count)}" for label, count in self.parts]
        if self.course:
            said.append(
                f"from {size(self.course[0][1])} at first over {size(self.peak[1])} at most to "
                f"{size(self.course[-1][1])} at last"
            )
        return "; ".join(said) + "."

    def marks(self, most: int = 4) -> list[float]:
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


def read(facts: Mapping[str, Any]) -> Memory | None:
    """The Memory of `facts["memory"]`, or None when there is nothing in it to draw."""
    given = facts.get("memory")
    if not isinstance(given, Mapping):
        return None
    parts = [
        (clean(label, 40), int(count)) for label, count in _pairs(given.get("parts")) if _number(count) and count > 0
    ]
    course = tuple((float(x), float(y)) for x, y in _pairs(given.get("course")) if _number(x) and _number(y))
    if not parts and len(course) < 2:
        return None
    if len(parts) > MOST + 1:
        parts = [*parts[:MOST], (f"{len(parts) - MOST} others", sum(count for _, count in parts[MOST:]))]
    total, limit = given.get("total"), given.get("limit")
    phases = given.get("events")
    starts = (
        tuple((clean(name, 24), float(at)) for name, at in phases.items() if _number(at))
        if isinstance(phases, Mapping)
        else ()
    )
    return Memory(
        tuple(parts),
        int(total) if _number(total) else sum(count for _, count in parts),
        int(limit) if _number(limit) and limit > 0 else None,
        course if len(course) > 1 else (),
        starts,
        clean(given.get("title") or "Memory", 80),
        clean(given.get("axis") or "allocations", 40),
    )


def _pairs(given: Any) -> Sequence[Any]:
    pairs = given if isinstance(given, (list, tuple)) else ()
    return [p for p in pairs if isinstance(p, (list, tuple)) and len(p) == 2]


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
