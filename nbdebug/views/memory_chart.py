"""Where memory is, as an SVG inside an <img>: a bar for each part, one of all against the limit, and the course below.

Ground and colours as in `chart.py`.
"""

from __future__ import annotations

import base64
import html

from nbdebug.sizes import size
from nbdebug.views.chart import FAINT, FAULT, INK, VALUES, WIDTH
from nbdebug.views.memory import COLOURS, Memory

LEFT, RIGHT, TOP, ROW, TALL = 170, 86, 26, 20, 110
EDGE = 74
"""Left of the course: its numbers are short, the parts' names are not."""


def image(memory: Memory) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    data = base64.b64encode(svg(memory).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(memory.sentence())}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(memory: Memory) -> str:
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


def _parts(memory: Memory) -> tuple[list[str], int]:
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


def _all(memory: Memory, scale: float, y: int) -> list[str]:
    """All parts in one bar, one after the other: what has to fit under the limit."""
    drawn, x = [_text(LEFT - 10, y + 11, "in all", "end", weight=600)], float(LEFT)
    for (_, count), colour in zip(memory.parts, COLOURS):
        drawn.append(f'<rect x="{x:.1f}" y="{y + 2}" width="{scale * count:.1f}" height="12" fill="{colour}"/>')
        x += scale * count
    return [*drawn, _text(x + 7, y + 12, size(memory.total))]


def _course(memory: Memory, top: float) -> list[str]:
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
