"""Modules against the ends of a half precision type, as an SVG inside an <img>, which untrusted notebooks keep.

Ground and colours as in `chart.py`. A kept module is marked in words too.
"""

from __future__ import annotations

import base64
import html

from nbdebug.views.chart import FAULT, INK, VALUES, WIDTH
from nbdebug.views.ranges import Ranges

LEFT, RIGHT, TOP, ROW = 150, 108, 40, 17
GRADIENT = "#b97a3c"


def image(ranges: Ranges) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    data = base64.b64encode(svg(ranges).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(ranges.sentence())}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(ranges: Ranges) -> str:
    foot = TOP + ROW * len(ranges.lines)
    drawn = [*_ends(ranges, foot), *_lines(ranges), *_axis(ranges, foot)]
    tall = foot + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="11.5" '
        f'fill="{INK}">{"".join(drawn)}</svg>'
    )


def _x(ranges: Ranges, power: float) -> float:
    low, high = ranges.window
    return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(power, low), high) - low) / (high - low)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = INK, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )


def _ends(ranges: Ranges, foot: float) -> list[str]:
    """Where the type ends, and where its small numbers begin to lose digits."""
    low, high = ranges.window
    drawn = [_text(0, 13, f"Sizes of each module's values, against what {ranges.dtype} can hold", weight=600)]
    for power, said in (
        (ranges.span.largest + 1.0, f"end of {ranges.dtype}: {ranges.span.most}"),
        (float(ranges.span.normal), "fewer digits below"),
    ):
        if low <= power <= high:
            x = _x(ranges, power)
            anchor = "start" if power > 0 and x < WIDTH - 7 * len(said) else "end"  # each on its own side
            drawn += [
                f'<path d="M{x:.1f} {TOP - 6}V{foot + 4}" stroke="{INK}" stroke-dasharray="4 3" fill="none"/>',
                _text(x, TOP - 11, said, anchor),
            ]
    return drawn


def _lines(ranges: Ranges) -> list[str]:
    drawn = []
    for row, line in enumerate(ranges.lines):
        y = TOP + ROW * row + 9
        colour = FAULT if line.kept else VALUES
        x1, x2 = _x(ranges, line.low), _x(ranges, line.high)
        drawn += [
            _text(LEFT - 10, y + 4, _short(line.name), "end", colour if line.kept else INK, 700 if line.kept else 400),
            f'<rect x="{x1:.1f}" y="{y - 4}" width="{max(2.0, x2 - x1):.1f}" height="8" rx="2" fill="{colour}" '
            'fill-opacity="0.75"/>',
        ]
        if line.gradient is not None:
            drawn.append(f'<circle cx="{_x(ranges, line.gradient):.1f}" cy="{y}" r="3" fill="{GRADIENT}"/>')
        if line.kept:
            drawn.append(_text(WIDTH - RIGHT + 8, y + 4, "kept in float32", colour=FAULT, weight=600))
    return drawn


def _short(name: str) -> str:
    """A name of which the end is kept, in whole parts where it can be: it tells modules apart."""
    if len(name) <= 20:
        return name
    while len(name) > 20 and "." in name:
        name = name.partition(".")[2]
    return "…" + name[-20:]


def _axis(ranges: Ranges, foot: float) -> list[str]:
    low, high = ranges.window
    apart = next(k for k in (2, 4, 5, 10, 20, 50, 100, 200, 1000) if (high - low) / k <= 9)
    drawn = [f'<path d="M{LEFT} {foot + 4}H{WIDTH - RIGHT}" stroke="{INK}" fill="none"/>']
    for power in range(int(-(-low // apart)) * apart, int(high) + 1, apart):
        x = _x(ranges, power)
        drawn += [
            f'<path d="M{x:.1f} {foot + 4}v4" stroke="{INK}" fill="none"/>',
            f'<text x="{x:.1f}" y="{foot + 21}" text-anchor="middle">2<tspan dy="-4" font-size="8.5">{power}'
            "</tspan></text>",
        ]
    said = []
    if any(line.gradient is not None for line in ranges.lines):
        drawn.append(f'<circle cx="{LEFT + 4}" cy="{foot + 35}" r="3" fill="{GRADIENT}"/>')
        said.append("largest gradient that reached the module")
    if ranges.more:
        said.append(f"{ranges.more} modules far from the ends left out")
    return [*drawn, _text(LEFT + 13, foot + 39, "; ".join(said))] if said else drawn
