"""Modules against the ends of a half precision type, as the SVG and the figure draw it: a line for each module, from
its smallest value to its largest, in powers of two.

`read` takes the plain facts of a report and gives a Ranges, or None.
"""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Mapping
from typing import Any, TypeGuard

from nbdebug.views.plots.histogram import FAULT, INK, SPANS, VALUES, WIDTH, Span
from nbdebug.views.wording import clean, clip, number

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
        """The powers of two that are shown: all lines, and both ends of the type where they are near."""
        lows = [line.low for line in self.lines] + [g for line in self.lines if (g := line.gradient) is not None]
        highs = [line.high for line in self.lines]
        low, high = min(lows), max(highs)
        low = min(low, max(self.span.normal, low - 30.0))
        high = max(high, min(self.span.largest + 1.0, high + 30.0))
        return low - 2, high + 2

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        top = max(self.lines, key=lambda line: line.high)
        kept = [line.name for line in self.lines if line.kept]
        said = (
            f"Sizes of the values of {number(len(self.lines))} modules against {self.dtype}, which ends at "
            f"2^{self.span.largest + 1}: the largest is 2^{top.high:.1f}, in {top.name}"
        )
        return said + (f"; kept in float32: {', '.join(kept[:8])}" if kept else "") + "."


def read(given: Mapping[str, Any]) -> Ranges | None:
    """The picture of these numbers, or None when there is nothing in them to draw."""
    if given.get("dtype") not in SPANS:
        return None
    span = SPANS[given["dtype"]]
    modules = given.get("modules")
    lines = [line for m in (modules if isinstance(modules, (list, tuple)) else ()) if (line := _line(m)) is not None]
    if not lines:
        return None
    near = sorted(lines, key=lambda line: (not line.kept, min(span.largest + 1 - line.high, line.low - span.normal)))
    shown = set(map(id, near[:MOST]))
    return Ranges(given["dtype"], span, tuple(line for line in lines if id(line) in shown), len(lines) - len(shown))


def _line(given: Any) -> RangeLine | None:
    if not isinstance(given, Mapping):
        return None
    values, gradient = given.get("values"), given.get("gradient")
    if not isinstance(values, (list, tuple)) or len(values) != 2 or not all(map(_number, values)):
        return None
    name = clean(given.get("name") or "the model", 60)
    return RangeLine(
        name,
        float(values[0]),
        float(values[1]),
        float(gradient) if _number(gradient) else None,
        given.get("kept") is True,
    )


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e5 < value < 1e5


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


FIGURE_INK, FAINT = "#808080", "#a0a0a0"


def tall(ranges: Ranges) -> float:
    """Inches."""
    return 1.5 + 0.22 * len(ranges.lines)


def draw(figure: Any, ranges: Ranges) -> None:
    """Draw into a figure or a part of one."""
    axes = figure.subplots()
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FIGURE_INK, labelsize=8.5, length=3, color=FAINT)
    low, high = ranges.window
    for row, line in enumerate(ranges.lines):
        axes.plot(
            [line.low, max(line.high, line.low + 0.1)],
            [row, row],
            color=FAULT if line.kept else VALUES,
            linewidth=6,
            solid_capstyle="butt",
            alpha=0.8,
        )
        if line.gradient is not None:
            axes.plot(line.gradient, row, "o", color=GRADIENT, markersize=4.5)
        if line.kept:
            axes.text(high, row, "kept in float32", va="center", fontsize=8.5, color=FAULT, fontweight="bold")
    for power, said in (
        (ranges.span.largest + 1, f"end of {ranges.dtype}: {ranges.span.most}"),
        (ranges.span.normal, "fewer digits below"),
    ):
        if low <= power <= high:
            axes.axvline(power, color=FIGURE_INK, linestyle=(0, (4, 3)), linewidth=1)
            axes.annotate(
                said,
                (power, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="left" if power > 0 else "right",
                fontsize=8.5,
                color=FIGURE_INK,
            )
    axes.set_yticks(range(len(ranges.lines)), [clip(line.name, 30) for line in ranges.lines], parse_math=False)
    for label, line in zip(axes.get_yticklabels(), ranges.lines):
        label.set_color(FAULT if line.kept else FIGURE_INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(low, high)
    axes.set_ylim(len(ranges.lines) - 0.4, -0.6)
    axes.xaxis.set_major_locator(_whole())
    axes.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    dots = any(line.gradient is not None for line in ranges.lines)
    axes.set_xlabel(
        "size of the values"
        + " (the dot: the largest gradient that reached the module)" * dots
        + f"; {ranges.more} modules far from the ends left out" * bool(ranges.more),
        fontsize=8.5,
        color=FIGURE_INK,
    )
    axes.set_title(
        f"Sizes of each module's values, against what {ranges.dtype} can hold",
        loc="left",
        fontsize=9.5,
        color=FIGURE_INK,
        pad=18,
    )


def _whole() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=9, integer=True)
