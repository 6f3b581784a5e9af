"""A small picture of the values' exponents, as an SVG inside an <img>, which untrusted notebooks keep.

Above, close up: how many values have which size, and beside them the zeros, infinities and NaN. Below, from far: where
these sizes lie in what float16, bfloat16 and float32 can hold. An image cannot see the theme of its page, so it has no
background and its colours are midway: as far from white as from the #212121 of dark themes.
"""

from __future__ import annotations

import base64
import html

from nbdebug.views.exponents import SPANS, Histogram, height, levels, power, ticks
from nbdebug.views.words import number

VALUES, FAULT, INK, FAINT = "#4d86c2", "#d4564c", "#808080", "#80808066"
WIDTH, TOP, TALL, LEFT, RIGHT = 640, 34, 90, 66, 12
FOOT = TOP + TALL
SLOT, GAP = 44, 12
"""Width of the column of one kind of special value, and the air between these columns and the finite values."""


def image(histogram: Histogram) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    data = base64.b64encode(svg(histogram).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(histogram.sentence())}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(histogram: Histogram) -> str:
    tall = FOOT + 44 + 17 * len(histogram.dtypes) + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="11.5" '
        f'fill="{INK}">{"".join([*_close(histogram), *_far(histogram)])}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = INK, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )


def _box(x: float, y: float, wide: float, tall: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(wide, 1):.1f}" height="{max(tall, 0):.1f}" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"{dashed} fill="none"/>'


def _sides(histogram: Histogram) -> tuple[float, float]:
    """Where the close view begins and ends: zeros stand left of it, infinities and NaN right, a gap between."""
    zeros = sum(s.name == "zero" for s in histogram.specials)
    others = len(histogram.specials) - zeros
    return LEFT + (SLOT + GAP) * zeros, WIDTH - RIGHT - SLOT * others - GAP * (others > 0)


def _close(histogram: Histogram) -> list[str]:
    low, high = histogram.window
    left, right = _sides(histogram)
    step = (right - left) / (high + 1 - low)
    drawn = [_text(0, TOP - 16, "how many", "start")]
    for level in levels(histogram.tallest):
        y = FOOT - TALL * height(level, histogram.tallest)
        drawn += [_line(left, y, right, y, "#80808033"), _text(LEFT - 8, y + 4, number(level), "end")]
    for bar in histogram.bars:
        x, wide = left + (bar.first - low) * step, (bar.last + 1 - bar.first) * step
        gap = min(1.5, wide / 4)
        for count, colour in ((bar.count, VALUES), (bar.bad, FAULT)):
            tall = TALL * height(count, histogram.tallest)
            drawn += [_box(x, FOOT - tall, wide - gap, tall, colour)] if count else []
    drawn.append(_line(left, FOOT, right, FOOT, INK))
    for exponent in ticks(histogram.window, 9):
        x = left + (exponent - low) * step
        drawn += [_line(x, FOOT, x, FOOT + 4, INK), _text(x, FOOT + 17, power(exponent))]
    return [*drawn, *_specials(histogram, right), *_ends(histogram, left, step)]


def _specials(histogram: Histogram, right: float) -> list[str]:
    drawn, after = [], right + GAP
    for special in histogram.specials:
        x = LEFT if special.name == "zero" else after
        after += 0 if special.name == "zero" else SLOT
        tall, colour = TALL * height(special.count, histogram.tallest), FAULT if special.bad else VALUES
        drawn += [
            _box(x + 10, FOOT - tall, SLOT - 20, tall, colour),
            _line(x, FOOT, x + SLOT, FOOT, INK),
            _text(x + SLOT / 2, FOOT - tall - 5, number(special.count), colour=colour, weight=600),
            _text(x + SLOT / 2, FOOT + 17, special.name),
        ]
    return drawn


def _ends(histogram: Histogram, left: float, step: float) -> list[str]:
    """Dashed lines where the window shows the end of a type."""
    low, high = histogram.window
    named: dict[int, list[str]] = {}
    for dtype in histogram.dtypes:
        for edge in (SPANS[dtype].subnormal, SPANS[dtype].largest + 1):
            if low < edge <= high:
                named.setdefault(edge, []).append(dtype)
    drawn = []
    for edge, dtypes in named.items():
        x = left + (edge - low) * step
        anchor = "start" if x < WIDTH / 3 else "end" if x > WIDTH * 2 / 3 else "middle"
        drawn += [_line(x, TOP - 8, x, FOOT, INK, "3 3"), _text(x, TOP - 14, f"end of {', '.join(dtypes)}", anchor)]
    return drawn


def _far(histogram: Histogram) -> list[str]:
    """One strip for each type, from its smallest to its largest number; the band shows where the values are."""
    low, high = histogram.range
    left, right, top = LEFT + 52, WIDTH - RIGHT - 46, FOOT + 42
    step = (right - left) / (high + 1 - low)
    drawn = []
    for i, dtype in enumerate(histogram.dtypes):
        span, y, own = SPANS[dtype], top + 17 * i, dtype == histogram.dtype
        start, normal, end = (left + (e - low) * step for e in (span.subnormal, span.normal, span.largest + 1))
        drawn += [
            _text(LEFT - 8, y + 8, dtype, "end", weight=700 if own else 400),
            _box(start, y + 3, normal - start, 3, FAINT),
            _box(normal, y + 2, end - normal, 5, INK if own else FAINT),
            _text(start - 5, y + 8, span.least, "end"),
            _text(end + 5, y + 8, span.most, "start"),
        ]
    if histogram.bars:
        x, wide = left + (histogram.low - low) * step, max(3, (histogram.high + 1 - histogram.low) * step)
        tall = 17 * len(histogram.dtypes)
        drawn += [
            f'<rect x="{x:.1f}" y="{top - 5}" width="{wide:.1f}" height="{tall + 2}" rx="2" fill="{VALUES}" '
            f'fill-opacity="0.3" stroke="{VALUES}"/>',
            _text(x + wide / 2, top + tall + 11, "the values", colour=VALUES),
        ]
    return drawn
