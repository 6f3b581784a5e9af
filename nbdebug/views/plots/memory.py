"""Where memory is, as the SVG and the figure draw it: a bar for each part, and live bytes over the events of a step.

`read` takes the plain facts of a report and gives a Memory, or None.
"""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from nbdebug.text import UNITS, size
from nbdebug.views.plots.histogram import FAINT, FAULT, INK, VALUES, WIDTH
from nbdebug.views.wording import clean

MOST = 9
"""Bars; what is left is one more."""
COLOURS = ("#4d86c2", "#b97a3c", "#5f9a5a", "#9a6fb0", "#c0645c", "#4f9c9c", "#8a8a3a", "#7a7f8c", "#a8785f", "#808080")


@dataclasses.dataclass(frozen=True)
class MemoryPlot:
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


def read(given: Mapping[str, Any]) -> MemoryPlot | None:
    """The picture of these numbers, or None when there is nothing in them to draw."""
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
    return MemoryPlot(
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


LEFT, RIGHT, TOP, ROW, TALL = 170, 86, 26, 20, 110
EDGE = 74
"""Left of the course: its numbers are short, the parts' names are not."""


def image(memory: MemoryPlot) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    data = base64.b64encode(svg(memory).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(memory.sentence())}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(memory: MemoryPlot) -> str:
    drawn, foot = _parts(memory)
    if memory.course:
        drawn += _course(memory, foot + 34)
        foot += 34 + TALL + 36
    tall = foot + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="11.5" '
        f'fill="{INK}">{"".join(drawn)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = INK, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )


def _parts(memory: MemoryPlot) -> tuple[list[str], int]:
    """The bars and where they end. All share one scale: the limit, or the total."""
    whole = max(memory.limit or 0, memory.total, 1)
    room = WIDTH - LEFT - RIGHT
    said = f"{memory.title}: {size(memory.total)}" + (f" of {size(memory.limit)}" if memory.limit else "")
    over = memory.limit is not None and memory.total > memory.limit
    drawn = [_text(0, 14, said + (", more than there is" if over else ""), colour=FAULT if over else INK, weight=600)]
    y = TOP
    for (label, count), colour in zip(memory.parts, COLOURS):
        wide = max(1.0, room * count / whole)
        drawn += [
            _text(LEFT - 10, y + 11, label, "end"),
            f'<rect x="{LEFT}" y="{y + 2}" width="{wide:.1f}" height="12" fill="{colour}"/>',
            _text(LEFT + wide + 7, y + 12, size(count)),
        ]
        y += ROW
    if memory.limit:
        drawn += _all(memory, room / whole, y)
        y += ROW
        x = LEFT + room * memory.limit / whole
        drawn.append(
            f'<path d="M{x:.1f} {TOP - 4}V{y}" stroke="{FAULT if over else INK}" stroke-dasharray="4 3" fill="none"/>'
        )
        drawn.append(_text(x, y + 12, f"limit {size(memory.limit)}", "end" if x > WIDTH - 90 else "middle"))
        y += 16
    return drawn, y


def _all(memory: MemoryPlot, scale: float, y: int) -> list[str]:
    """All parts in one bar, one after the other: what has to fit under the limit."""
    drawn, x = [_text(LEFT - 10, y + 11, "in all", "end", weight=600)], float(LEFT)
    for (_, count), colour in zip(memory.parts, COLOURS):
        drawn.append(f'<rect x="{x:.1f}" y="{y + 2}" width="{scale * count:.1f}" height="12" fill="{colour}"/>')
        x += scale * count
    return [*drawn, _text(x + 7, y + 12, size(memory.total))]


def _course(memory: MemoryPlot, top: float) -> list[str]:
    first, last, high = memory.course[0][0], memory.course[-1][0], 1.18 * max(memory.peak[1], 1.0)
    foot, room = top + TALL, WIDTH - EDGE - 12

    def place(x: float, y: float) -> tuple[float, float]:
        return EDGE + room * (x - first) / max(last - first, 1e-9), foot - TALL * y / high

    drawn = [_text(EDGE, top - 12, f"live memory over one step, by {memory.axis}")]
    for value in memory.marks():
        y = place(first, value)[1]
        drawn += [
            f'<path d="M{EDGE} {y:.1f}H{WIDTH - 12}" stroke="#80808033" fill="none"/>',
            _text(EDGE - 8, y + 4, size(value) if value else "0", "end"),
        ]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in memory.course))
    drawn += [
        f'<path d="M{EDGE} {foot}L{path}L{EDGE + room} {foot}Z" fill="{VALUES}" fill-opacity="0.28"/>',
        f'<path d="M{path}" stroke="{VALUES}" stroke-width="1.3" stroke-linejoin="round" fill="none"/>',
    ]
    free = 0.0  # where the next name can begin without running into the one before
    for name, at in memory.phases:
        x = place(at, 0)[0]
        drawn.append(f'<path d="M{x:.1f} {top - 4}V{foot}" stroke="{INK}" stroke-dasharray="3 3" fill="none"/>')
        if x >= free:
            drawn.append(_text(x + 3, foot + 15, name))
            free = x + 8 + 6.5 * len(name)
    x, y = place(*memory.peak)
    anchor = "end" if x > WIDTH - 150 else "start"
    drawn += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{FAULT}"/>',
        _text(x + (-7 if anchor == "end" else 7), y - 5, f"peak {size(memory.peak[1])}", anchor, FAULT, 600),
        f'<path d="M{EDGE} {foot}H{WIDTH - 12}" stroke="{FAINT}" fill="none"/>',
    ]
    return drawn


FIGURE_INK, FAINT_INK = "#808080", "#a0a0a0"


def tall(memory: MemoryPlot) -> float:
    """Inches."""
    return sum(_rows(memory))


def _rows(memory: MemoryPlot) -> list[float]:
    bars = len(memory.parts) + bool(memory.limit)
    return [0.9 + 0.28 * bars] * bool(memory.parts) + [2.6] * bool(memory.course)


def draw(figure: Any, memory: MemoryPlot) -> None:
    """Draw into a figure or a part of one."""
    rows = _rows(memory)
    axes = list(figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0])
    if memory.parts:
        _figure_parts(axes.pop(0), memory)
    if memory.course:
        _figure_course(axes.pop(0), memory)


def _figure_parts(axes: Any, memory: MemoryPlot) -> None:
    _quiet(axes)
    places = list(range(len(memory.parts)))
    counts = [count for _, count in memory.parts]
    axes.barh(places, counts, height=0.62, color=[COLOURS[i % len(COLOURS)] for i in places])
    for place, count in zip(places, counts):
        axes.text(count, place, f"  {size(count)}", va="center", fontsize=8.5, color=FIGURE_INK)
    labels = [label for label, _ in memory.parts]
    if memory.limit:
        labels.append("in all")
        places.append(len(places))
        axes.barh(
            [places[-1]] * len(counts),
            counts,
            left=[sum(counts[:i]) for i in range(len(counts))],
            height=0.62,
            color=[COLOURS[i % len(COLOURS)] for i in range(len(counts))],
        )
        axes.text(sum(counts), places[-1], f"  {size(memory.total)}", va="center", fontsize=8.5, color=FIGURE_INK)
    axes.set_yticks(places, labels, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xticks([])
    whole = max(memory.limit or 0, memory.total if memory.limit else 0, *counts)
    axes.set_xlim(0, whole * 1.15)
    over = memory.limit is not None and memory.total > memory.limit
    said = f"{memory.title}: {size(memory.total)}"
    if memory.limit:
        said += f" of {size(memory.limit)}" + (", more than there is" if over else "")
        axes.axvline(memory.limit, color=FAULT if over else FIGURE_INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_title(said, loc="left", fontsize=9.5, color=FAULT if over else FIGURE_INK, pad=8, parse_math=False)


def _figure_course(axes: Any, memory: MemoryPlot) -> None:
    _quiet(axes)
    across, up = zip(*memory.course)
    axes.fill_between(across, up, color=VALUES, alpha=0.28, linewidth=0)
    axes.plot(across, up, color=VALUES, linewidth=1.2)
    high = memory.peak[1]
    for name, at in memory.phases:
        axes.axvline(at, color=FIGURE_INK, linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(
            name,
            (at, 0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=FIGURE_INK,
        )
    axes.plot(*memory.peak, "o", color=FAULT, markersize=5)
    late = memory.peak[0] > across[0] + 0.75 * (across[-1] - across[0])
    axes.annotate(
        f"peak {size(high)}",
        memory.peak,
        xytext=(-6 if late else 6, 4),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=9,
        color=FAULT,
        fontweight="bold",
    )
    marks = memory.marks(5)
    axes.set_yticks(marks, [size(value) if value else "0" for value in marks])
    axes.grid(axis="y", color=FAINT_INK, alpha=0.3, linewidth=0.8)
    axes.set_ylim(0, high * 1.12)
    axes.set_xlim(across[0], across[-1])
    axes.set_title("live memory over one step", loc="left", fontsize=9.5, color=FIGURE_INK, pad=6)
    axes.set_xlabel(memory.axis, fontsize=8.5, color=FIGURE_INK)


def _quiet(axes: Any) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FIGURE_INK, labelsize=8.5, length=3, color=FAINT_INK)
