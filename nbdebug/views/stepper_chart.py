"""Where a stepper stands, as HTML: the layers as a table with a mark, and histograms of the tensors as an SVG inside an
<img>. Both are kept in untrusted notebooks. Ground and colours as in `chart.py`.
"""

from __future__ import annotations

import base64
import html
import math

from nbdebug.views.chart import FAULT, INK, VALUES, WIDTH
from nbdebug.views.stepper import HERE, Row, Stepping, Values
from nbdebug.views.words import clip, number

ACROSS, TALL, HEAD, FOOT = 3, 58, 20, 24
CELL = WIDTH / ACROSS
PLAIN = "border:0;background:none;text-align:left;padding:.06em 1.6em .06em 0;font-weight:400;white-space:nowrap"
PALE = "opacity:.72"


def image(stepping: Stepping) -> str:
    """A table, and `<img src="data:image/svg+xml;base64,…" alt="…">` where there are values."""
    drawn = _table(stepping)
    if stepping.values:
        data = base64.b64encode(svg(stepping).encode()).decode()
        drawn += (
            f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(stepping.sentence())}" '
            f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;'
            'margin:.8em 0 0">'
        )
    return drawn


def _table(stepping: Stepping) -> str:
    gradient = any(row.gradient for row in stepping.rows)
    heads = ("Layer", "Type", "Output") + (("Gradient handed on",) if gradient else ())
    head = "".join(
        f'<th scope="col" style="{PLAIN};{PALE};border-bottom:1px solid rgba(128,128,128,.25)">{h}</th>' for h in heads
    )
    rows = "".join(_row(row, gradient) for row in stepping.rows)
    return (
        '<div style="overflow-x:auto;max-width:100%"><table style="border-collapse:collapse;border:0;'
        f'font-size:.92em;line-height:1.4;margin:0"><thead><tr style="background:none">{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(row: Row, gradient: bool) -> str:
    name, kind, made, handed_on = map(html.escape, row.cells())
    mark = f"{HERE}&nbsp;" if row.here else "&nbsp;&nbsp;&nbsp;"
    weight = "font-weight:700" if row.here else "font-weight:400" if row.ran else PALE
    colour = f"color:{FAULT}"
    bad = (made.startswith("not finite"), "not finite" in handed_on)
    cells = [
        f'<td style="{PLAIN};{colour if wrong else PALE if not row.here else ""}">{said}</td>'
        for said, wrong in zip((kind, made), (False, bad[0]))
    ]
    if gradient:
        cells.append(f'<td style="{PLAIN};{colour if bad[1] else PALE}">{handed_on.removeprefix("gradient ")}</td>')
    return (
        f'<tr style="background:none"><th scope="row" style="{PLAIN};{weight};'
        f'padding-left:{1.1 * row.depth:.1f}em">{mark}{name}</th>{"".join(cells)}</tr>'
    )


def svg(stepping: Stepping) -> str:
    rows = math.ceil(len(stepping.values) / ACROSS)
    tall = rows * (HEAD + TALL + FOOT) + 14
    drawn = [
        part
        for i, values in enumerate(stepping.values)
        for part in _histogram(values, CELL * (i % ACROSS), (HEAD + TALL + FOOT) * (i // ACROSS))
    ]
    drawn.append(_text(0, tall - 4, "How many elements have which value; heights grow with the square root.", size=10))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="11.5" '
        f'fill="{INK}">{"".join(drawn)}</svg>'
    )


def _histogram(values: Values, left: float, top: float) -> list[str]:
    """One tensor: its name, what is not finite in it, bars, and both ends."""
    wide, foot = CELL - 24, top + HEAD + TALL
    drawn = [_text(left, top + 13, clip(values.name, 20 if values.bad else 30), weight=600)]
    if values.bad:
        drawn.append(_text(left + wide, top + 13, clip(values.beside, 16), "end", FAULT, 600))
    if values.counts:
        tallest, step = max(values.counts) or 1, wide / len(values.counts)
        for i, count in enumerate(values.counts):
            height = TALL * math.sqrt(count / tallest)
            drawn += (
                [
                    f'<rect x="{left + i * step:.1f}" y="{foot - height:.1f}" width="{step - 1:.1f}" '
                    f'height="{max(height, 1):.1f}" fill="{VALUES}"/>'
                ]
                if count
                else []
            )
    drawn.append(f'<path d="M{left:.1f} {foot:.1f}h{wide:.1f}" stroke="{INK}" fill="none"/>')
    if values.low is None or values.high is None:
        return [*drawn, _text(left + wide / 2, foot - TALL / 2, "no finite value", "middle", FAULT)]
    if values.low == values.high:
        return [*drawn, _text(left + wide / 2, foot - TALL / 2, f"all {number(values.low)}", "middle")]
    if values.low < 0 < values.high:
        x = left + wide * -values.low / (values.high - values.low)
        drawn.append(f'<path d="M{x:.1f} {foot:.1f}v4" stroke="{INK}" fill="none"/>')
        if 0.3 < (x - left) / wide < 0.7:
            drawn.append(_text(x, foot + 15, "0", "middle"))
    return [
        *drawn,
        _text(left, foot + 15, number(values.low)),
        _text(left + wide, foot + 15, number(values.high), "end"),
    ]


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = INK, weight: int = 400, size: float = 11.5
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}" '
        f'font-size="{size}">{html.escape(text)}</text>'
    )
