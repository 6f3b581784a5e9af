"""A gradient watch as an SVG inside an <img>, which untrusted notebooks keep: loss and norm as curves, below them the
norms of layers over steps as a map. Ground and colours as in `chart.py`; what is not finite is named in words too.
"""

from __future__ import annotations

import base64
import html as escaping

from nbdebug.finding import Report
from nbdebug.views import pixels
from nbdebug.views.chart import FAINT, FAULT, INK, VALUES, WIDTH
from nbdebug.views.watch import PALETTE, Points, Watched, read
from nbdebug.views.words import clip, number

LEFT, RIGHT, TOP, GAP, TALL = 150, 14, 24, 34, 64
SECOND = "#c98a2b"
"""The second curve of a panel, dashed as well."""
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
PANELS = (("loss", "validation loss"), ("gradient norm", "after clipping"), ("loss scale",))
MARKS = {"gradient norm": "clipped", "loss scale": "skipped"}
"""Panels with short marks below: what steps they mark."""


def html(report: Report) -> str:
    """The picture alone, for the live view; a word while there is nothing to draw."""
    seen = read(report.facts)
    return image(seen) if seen else "<p>No step has been watched yet.</p>"


def image(seen: Watched) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    data = base64.b64encode(svg(seen).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{escaping.escape(seen.sentence())}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(seen: Watched) -> str:
    drawn, top = [], float(TOP)
    known = dict(seen.curves)
    for names in PANELS:
        curves = [(name, known[name]) for name in names if name in known]
        if curves:
            drawn += _panel(curves, seen, top)
            top += TALL + GAP
            drawn += _marks(seen, MARKS.get(curves[0][0], ""), top - GAP)
    if seen.layers:
        drawn += _map(seen, top)
        top += _row(seen) * len(seen.layers) + GAP
    elif seen.asked:
        drawn.append(_text(LEFT, top + 24, seen.title(), "start"))
    drawn += _axis(seen, top - GAP)
    tall = top + 14 if seen.layers else top + 38 if seen.asked else top + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall:.0f}" width="{WIDTH}" '
        f'height="{tall:.0f}" font-family="{FONTS}" font-size="11.5" fill="{INK}">'
        f"{''.join([*drawn, *_legend(seen, top - 4)])}</svg>"
    )


def _x(seen: Watched, step: float) -> float:
    return LEFT + seen.across.at(step) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = INK, size: float = 11.5) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size:g}">'
        f"{escaping.escape(text)}</text>"
    )


def _panel(curves: list[tuple[str, Points]], seen: Watched, top: float) -> list[str]:
    """Up to two curves over their horizontal rules."""
    scale = seen.scale([y for _, points in curves for _, y in points])
    drawn, x = [], float(LEFT)
    for (name, _), colour in zip(curves, (VALUES, SECOND)):
        said = name + "  (logarithmic)" * (scale.log and colour == VALUES)
        drawn.append(_text(x, top - 9, said, "start", INK if len(curves) == 1 else colour))
        x += 7 * len(said) + 16
    for value, said in scale.ticks(3):
        y = top + TALL * (1 - scale.at(value))
        drawn += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#80808033" fill="none"/>',
            _text(LEFT - 8, y + 4, said, "end"),
        ]
    for (_, points), colour in zip(curves, (VALUES, SECOND)):
        places = [(_x(seen, step), top + TALL * (1 - scale.at(value))) for step, value in points]
        dash = ' stroke-dasharray="5 3"' if colour == SECOND else ""
        drawn.append(
            f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5" fill="{colour}"/>'
            if len(places) == 1
            else f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}" stroke="{colour}" '
            f'stroke-width="1.3" stroke-linejoin="round" fill="none"{dash}/>'
        )
    return drawn


def _marks(seen: Watched, what: str, foot: float) -> list[str]:
    """Clipped steps under the norm, or those that a scaler left out under its scale, as short marks."""
    steps = {"clipped": seen.clipped, "skipped": seen.skipped}.get(what, ())
    if not steps:
        return []
    places = sorted({round(_x(seen, step)) for step in steps})
    drawn = [f'<path d="{"".join(f"M{x} {foot + 3:.0f}v6" for x in places)}" stroke="{INK}" fill="none"/>']
    said = f"| {number(len(steps))} skipped"  # that of clipped steps stands in the legend
    return [*drawn, _text(WIDTH - RIGHT, foot - TALL - 9, said, "end")] if what == "skipped" else drawn


def _row(seen: Watched) -> float:
    return min(14.0, max(5.0, 280 / len(seen.layers)))


def _map(seen: Watched, top: float) -> list[str]:
    """The norms of layers, a row each; names where there is room for them."""
    tall, count = _row(seen), len(seen.layers)
    first, last = _x(seen, seen.steps[0]), _x(seen, seen.steps[-1])
    wide = max(3.0, last - first)
    cells = [[seen.colour(value) for value in row] for _, row in seen.layers]
    drawn = [
        _text(LEFT, top - 7, seen.title(), "start"),
        f'<image x="{first:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall * count:.1f}" '
        f'preserveAspectRatio="none" style="image-rendering:pixelated" href="{pixels.address(cells)}"/>',
    ]
    apart = max(1, round(10.5 / tall + 0.4))
    bad = set(seen.bad)
    for place, (name, _) in enumerate(seen.layers):
        if place % apart == 0 or name in bad:
            short = name if len(name) <= 22 else "…" + name[-21:]
            drawn.append(
                _text(LEFT - 8, top + tall * (place + 0.5) + 3.5, short, "end", FAULT if name in bad else INK, 10)
            )
    return drawn


def _axis(seen: Watched, foot: float) -> list[str]:
    drawn = [f'<path d="M{LEFT} {foot:.1f}H{WIDTH - RIGHT}" stroke="{INK}" fill="none"/>']
    for value, _ in seen.across.ticks(6):
        if value == int(value):
            x = _x(seen, value)
            drawn += [
                f'<path d="M{x:.1f} {foot:.1f}v4" stroke="{FAINT}" fill="none"/>',
                _text(x, foot + 16, number(int(value)), "end" if x > WIDTH - RIGHT - 20 else "middle"),
            ]
    return drawn


def _legend(seen: Watched, top: float) -> list[str]:
    """What the colours and marks mean."""
    if not seen.layers:
        return []
    low, high = seen.span
    lowest = "0" if seen.log is False else f"10^{low:.1f}"
    drawn = [_text(LEFT + 42, top + 9, lowest, "end", size=10)]
    for place, colour in enumerate(PALETTE):
        drawn.append(f'<rect x="{LEFT + 48 + 5 * place}" y="{top:.1f}" width="5.3" height="10" fill="{colour}"/>')
    x = LEFT + 54 + 5 * len(PALETTE)
    drawn.append(_text(x, top + 9, f"10^{high:.1f}", "start", size=10))
    said = ["| clipped"] * bool(seen.clipped)
    if seen.bad:
        said.append("red: not finite in " + clip(", ".join(seen.bad), 40))
    return drawn + [_text(x + 52, top + 9, " · ".join(said), "start", FAULT if seen.bad else INK, 10)] * bool(said)
