"""What a gradient watch has seen, as the SVG and the figure draw it: a map of layers over steps, and curves.

`read` takes the plain facts of a report and gives a Watched, or None.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import html as escaping
import itertools
import math
import numbers
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.report import Report
from nbdebug.views.plots.histogram import FAINT, FAULT, INK, VALUES, WIDTH
from nbdebug.views.plots.run import RunScale
from nbdebug.views.wording import TextTable, clean, clip, number

Points = tuple[tuple[float, float], ...]
_KEYS = ("3b3f8f", "3d62a8", "3f86b4", "4aa6ad", "6cbf9a", "a3cf86", "dcd878", "f2b45f", "e8823f")
_BETWEEN = 3


def _shades() -> tuple[str, ...]:
    """The keys, and `_BETWEEN` steps from each to the next."""
    parts = [[int(key[i : i + 2], 16) for i in (0, 2, 4)] for key in _KEYS]
    mixed = [
        [a + (b - a) * step / _BETWEEN for a, b in zip(one, other)]
        for one, other in itertools.pairwise(parts)
        for step in range(_BETWEEN)
    ]
    last = [float(v) for v in parts[-1]]
    return tuple("#" + "".join(f"{round(v):02x}" for v in colour) for colour in [*mixed, last])


PALETTE = _shades()
"""From small to large, mostly told apart by lightness too."""
TABLE = ("Layer", "Norm now", "Smallest", "Largest", "in step", "Update / weight")
BAD, ZERO = "#d4564c", "#80808055"
"""Not finite; exactly zero. No gradient has no colour."""


class LogScale(RunScale):
    """A logarithmic scale where the values span little, too: its ticks are then no powers of ten."""

    def _powers(self, most: int) -> list[float]:
        found = super()._powers(most)
        if len(found) < 2:
            power = math.floor(math.log10(self.low))
            found = [v for n in range(3) for k in (1, 2, 5) if self.low <= (v := k * 10.0 ** (power + n)) <= self.high]
        return found if len(found) > 1 else [v for v in self._even(most) if v >= self.low]


@dataclasses.dataclass(frozen=True)
class GradientMap:
    """steps: of the map's columns; layers: of its rows, each with log10 of its norms (None, or "zero", "nan", "inf");
    curves: name and points; clipped: steps; seen: how many steps there were; rows: of the table, as `layers.heat` gives
    them; counts: how many layers are drawn, of how many; skipped: steps that a GradScaler left out.

    From a panel: asked: the layers that were asked for ("": all of them; None: it is no panel's); log: logarithmic
    scales or linear ones (None: as the values want it)."""

    steps: tuple[int, ...]
    layers: tuple[tuple[str, tuple[Any, ...]], ...]
    curves: tuple[tuple[str, Points], ...]
    clipped: tuple[float, ...]
    seen: int
    rows: tuple[tuple[Any, ...], ...] = ()
    counts: tuple[int, int] = (0, 0)
    asked: str | None = None
    log: bool | None = None
    skipped: tuple[float, ...] = ()

    @functools.cached_property
    def span(self) -> tuple[float, float]:
        """The smallest and largest log10 that the colours tell apart: at most ten decades below the largest."""
        known = [v for _, row in self.layers for v in row if isinstance(v, float)]
        if not known:
            return 0.0, 1.0
        high = max(known)
        return max(min(known), high - 10, -300.0), max(high, min(known) + 0.5)

    @functools.cached_property
    def bad(self) -> list[str]:
        return [name for name, row in self.layers if any(v in ("nan", "inf") for v in row)]

    @functools.cached_property
    def across(self) -> RunScale:
        places = [*self.steps, *(x for _, points in self.curves for x, _ in points)]
        return RunScale(min(places), max(*places, min(places) + 1))

    def colour(self, value: Any) -> str | None:
        """The colour of a cell; None where there was no gradient."""
        if value is None:
            return None
        if isinstance(value, str):
            return ZERO if value == "zero" else BAD
        low, high = self.span
        share = (value - low) / (high - low) if self.log is not False else 10 ** min(0.0, value - high)
        share = min(1.0, max(0.0, share))
        return PALETTE[min(len(PALETTE) - 1, int(share * len(PALETTE)))]

    def scale(self, values: Sequence[float]) -> RunScale:
        """The scale of a curve: the one that the values want, or the one that was asked for. What falls below zero has
        no logarithm."""
        if self.log and min(values) >= 0 and max(values) > 0:
            above = [v for v in values if v > 0]
            return LogScale(min(above) / 1.1, max(above) * 1.1, True)
        fitting = RunScale.around(values)
        if self.log is not False or not fitting.log:
            return fitting
        return RunScale(0.0, max(values) * 1.06)

    def title(self) -> str:
        """What stands above the map."""
        said = f"gradient norm of each layer{', first layer on top' * (len(self.layers) > 1)}"
        if self.asked:
            shown, (drawn, of) = clip(self.asked, 24), self.counts
            said = (
                f"gradient norm of the {number(drawn)} of {number(of)} layers that match “{shown}”"
                if drawn
                else f"none of {number(of)} layers matches “{shown}”"
            )
        return said + "; linear colours" * (self.log is False and bool(self.layers))

    def table(self, most: int) -> TextTable:
        """The layers of the map in numbers."""
        body = tuple(
            (name, *(number(v) if v is not None else "" for v in (latest, least, largest, step, ratio)))
            for name, latest, least, largest, step, ratio in self.rows[:most]
        )
        return TextTable("", TABLE, body, len(self.rows) - len(body))

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        low, high = self.span
        said = (
            f"Gradient norms of {len(self.layers)} layers over {number(self.seen)} steps, from 10^{low:.1f} to "
            f"10^{high:.1f}"
        )
        said += f", of {number(self.counts[1])}: those that match “{clip(self.asked, 80)}”" if self.asked else ""
        said += f"; not finite in {clip(', '.join(self.bad), 120)}" if self.bad else ""
        for name, points in self.curves:
            values = [y for _, y in points]
            said += (
                f"; {name} {number(values[0])} at first, {number(values[-1])} at last, between "
                f"{number(min(values))} and {number(max(values))}"
            )
        said += f"; GradScaler left out {number(len(self.skipped))} of the steps drawn" if self.skipped else ""
        return said + (f"; clipped in {number(len(self.clipped))} of the steps drawn" if self.clipped else "") + "."


def read(given: Mapping[str, Any]) -> GradientMap | None:
    """The map of a gradient watch's numbers, or None when there is nothing in them to draw."""
    steps = tuple(s for s in _list(given, "steps") if isinstance(s, int))
    names, norms = _list(given, "layers"), _list(given, "norms")
    layers = tuple(
        (clean(name, 80), tuple(map(_cell, row)))
        for name, row in zip(names, norms)
        if isinstance(row, (list, tuple)) and len(row) == len(steps)
    )
    totals = _list(given, "totals")
    known = (
        ("loss", _points(_list(given, "losses"))),
        ("validation loss", _points(_list(given, "validation"))),
        ("gradient norm", _points(totals)),
        ("after clipping", _points(totals, 2)),
        ("loss scale", _points(_list(given, "scale"))),
    )
    clipped, skipped = (tuple(float(s) for s in _list(given, key) if _finite(s)) for key in ("clipped", "skipped"))
    curves = tuple((name, points) for name, points in known if points and (name != "after clipping" or clipped))
    if not curves and not (layers and steps):
        return None
    seen, asked, log = (given.get(key) for key in ("steps seen", "asked", "log"))
    drawn, of = (*(n for n in _list(given, "layer counts") if isinstance(n, int)), len(layers), len(layers))[:2]
    return GradientMap(
        steps,
        layers if steps else (),
        curves,
        clipped,
        seen if isinstance(seen, int) else len(steps),
        tuple(map(_row, _list(given, "table"))),
        (drawn, of),
        clean(asked, 200) if isinstance(asked, str) else None,
        log if isinstance(log, bool) else None,
        skipped,
    )


def _list(given: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = given.get(key)
    return value if isinstance(value, (list, tuple)) else ()


def _cell(value: Any) -> Any:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else "inf"
    return value if value in ("zero", "nan", "inf") else None


def _row(given: Any) -> tuple[Any, ...]:
    """A row of the table: a name, and five numbers or None."""
    values = [v if isinstance(v, numbers.Real) else None for v in given[1:]] if isinstance(given, (list, tuple)) else []
    return (clean(given[0], 80) if values else "", *(values + [None] * 5)[:5])


def _points(rows: Sequence[Any], column: int = 1) -> Points:
    return tuple(
        (float(row[0]), float(row[column]))
        for row in rows
        if isinstance(row, (list, tuple)) and len(row) > column and _finite(row[0]) and _finite(row[column])
    )


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and -1e300 < value < 1e300


def png(rows: Sequence[Sequence[str | None]]) -> bytes:
    """One pixel for each colour ("#rrggbb", "#rrggbbaa"; None is transparent), a row each; rows are equally long.

    Raises ValueError when there is no pixel."""
    if not rows or not rows[0]:
        raise ValueError("a picture has at least one pixel")
    colours = list(dict.fromkeys(c for row in rows for c in row))[:256]
    index = {colour: place for place, colour in enumerate(colours)}
    parts = [_parts(colour) for colour in colours]
    lines = b"".join(b"\0" + bytes(index.get(c, 0) for c in row) for row in rows)
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + _chunk(b"PLTE", b"".join(p[:3] for p in parts))
        + _chunk(b"tRNS", b"".join(p[3:] for p in parts))
        + _chunk(b"IDAT", zlib.compress(lines, 6))
        + _chunk(b"IEND", b"")
    )


def address(rows: Sequence[Sequence[str | None]]) -> str:
    """The same as a data: address."""
    return "data:image/png;base64," + base64.b64encode(png(rows)).decode()


def _parts(colour: str | None) -> bytes:
    if colour is None:
        return bytes(4)
    digits = colour.lstrip("#")
    return bytes.fromhex(digits if len(digits) == 8 else digits + "ff")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


LEFT, RIGHT, TOP, GAP, TALL = 150, 14, 24, 34, 64
SECOND = "#c98a2b"
"""The second curve of a panel, dashed as well."""
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
PANELS = (("loss", "validation loss"), ("gradient norm", "after clipping"), ("loss scale",))
MARKS = {"gradient norm": "clipped", "loss scale": "skipped"}
"""Panels with short marks below: what steps they mark."""


def html(report: Report) -> str:
    """The picture alone, for the live view; a word while there is nothing to draw."""
    seen = read(report.plot("gradients"))
    return image(seen) if seen else "<p>No step has been watched yet.</p>"


def image(seen: GradientMap) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    data = base64.b64encode(svg(seen).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{escaping.escape(seen.sentence())}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(seen: GradientMap) -> str:
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
        top += _chart_row(seen) * len(seen.layers) + GAP
    elif seen.asked:
        drawn.append(_text(LEFT, top + 24, seen.title(), "start"))
    drawn += _axis(seen, top - GAP)
    tall = top + 14 if seen.layers else top + 38 if seen.asked else top + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall:.0f}" width="{WIDTH}" '
        f'height="{tall:.0f}" font-family="{FONTS}" font-size="11.5" fill="{INK}">'
        f"{''.join([*drawn, *_legend(seen, top - 4)])}</svg>"
    )


def _x(seen: GradientMap, step: float) -> float:
    return LEFT + seen.across.at(step) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = INK, size: float = 11.5) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size:g}">'
        f"{escaping.escape(text)}</text>"
    )


def _panel(curves: list[tuple[str, Points]], seen: GradientMap, top: float) -> list[str]:
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


def _marks(seen: GradientMap, what: str, foot: float) -> list[str]:
    """Clipped steps under the norm, or those that a scaler left out under its scale, as short marks."""
    steps = {"clipped": seen.clipped, "skipped": seen.skipped}.get(what, ())
    if not steps:
        return []
    places = sorted({round(_x(seen, step)) for step in steps})
    drawn = [f'<path d="{"".join(f"M{x} {foot + 3:.0f}v6" for x in places)}" stroke="{INK}" fill="none"/>']
    said = f"| {number(len(steps))} skipped"  # that of clipped steps stands in the legend
    return [*drawn, _text(WIDTH - RIGHT, foot - TALL - 9, said, "end")] if what == "skipped" else drawn


def _chart_row(seen: GradientMap) -> float:
    return min(14.0, max(5.0, 280 / len(seen.layers)))


def _map(seen: GradientMap, top: float) -> list[str]:
    """The norms of layers, a row each; names where there is room for them."""
    tall, count = _chart_row(seen), len(seen.layers)
    first, last = _x(seen, seen.steps[0]), _x(seen, seen.steps[-1])
    wide = max(3.0, last - first)
    cells = [[seen.colour(value) for value in row] for _, row in seen.layers]
    drawn = [
        _text(LEFT, top - 7, seen.title(), "start"),
        f'<image x="{first:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall * count:.1f}" '
        f'preserveAspectRatio="none" style="image-rendering:pixelated" href="{address(cells)}"/>',
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


def _axis(seen: GradientMap, foot: float) -> list[str]:
    drawn = [f'<path d="M{LEFT} {foot:.1f}H{WIDTH - RIGHT}" stroke="{INK}" fill="none"/>']
    for value, _ in seen.across.ticks(6):
        if value == int(value):
            x = _x(seen, value)
            drawn += [
                f'<path d="M{x:.1f} {foot:.1f}v4" stroke="{FAINT}" fill="none"/>',
                _text(x, foot + 16, number(int(value)), "end" if x > WIDTH - RIGHT - 20 else "middle"),
            ]
    return drawn


def _legend(seen: GradientMap, top: float) -> list[str]:
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


FIGURE_INK, FAINT_INK = "#808080", "#a0a0a0"


def tall(seen: GradientMap) -> float:
    """Inches that the picture wants."""
    panels = sum(any(name in dict(seen.curves) for name in names) for names in PANELS)
    return 0.6 + 1.5 * panels + (max(1.6, 0.6 + 0.2 * len(seen.layers)) if seen.layers else 0.3)


def draw(figure: Any, seen: GradientMap) -> None:
    """Draw into a figure or a part of one."""
    known = dict(seen.curves)
    panels = [[(name, known[name]) for name in names if name in known] for names in PANELS]
    panels = [curves for curves in panels if curves]
    ratios = [1.5] * len(panels) + ([max(1.6, 0.6 + 0.2 * len(seen.layers))] if seen.layers else [])
    rows = list(figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0])
    for axes, curves in zip(rows, panels):
        _curves(axes, curves, seen)
        what = MARKS.get(curves[0][0], "")
        if steps := {"clipped": seen.clipped, "skipped": seen.skipped}.get(what):
            axes.plot(steps, [-0.04] * len(steps), "|", color=FIGURE_INK, markersize=6, clip_on=False)
            axes.annotate(
                f"| {what} ({number(len(steps))} of the steps drawn)",
                (1, 1.0),
                xycoords="axes fraction",
                ha="right",
                va="bottom",
                fontsize=8.5,
                color=FIGURE_INK,
            )
    if seen.layers:
        _figure_map(figure, rows[-1], seen)
    whole = [value for value, _ in seen.across.ticks(8) if value == int(value)]
    rows[-1].set_xticks(whole, [number(int(value)) for value in whole])
    rows[-1].set_xlim(seen.across.low - 0.5, seen.across.high + 0.5)
    rows[-1].set_xlabel("step", fontsize=8.5, color=FIGURE_INK)


def _curves(axes: Any, curves: list[Any], seen: GradientMap) -> None:
    _quiet(axes)
    scale = seen.scale([y for _, points in curves for _, y in points])
    for (name, points), colour, style in zip(curves, (VALUES, SECOND), ("-", "--")):
        axes.plot(
            [x for x, _ in points],
            [scale.at(y) for _, y in points],
            style,
            color=colour,
            linewidth=1.2,
            label=name,
            marker="o" * (len(points) == 1) or None,
        )
    ticks = scale.ticks()
    axes.set_yticks([scale.at(value) for value, _ in ticks], [said for _, said in ticks])
    axes.grid(axis="y", color=FAINT_INK, alpha=0.3, linewidth=0.8)
    axes.set_ylim(-0.04, 1.04)
    axes.set_title(curves[0][0] + " (logarithmic)" * scale.log, loc="left", fontsize=9.5, color=FIGURE_INK, pad=6)
    axes.tick_params(axis="x", length=0)
    if len(curves) > 1:
        axes.legend(fontsize=8.5, frameon=False, labelcolor=FIGURE_INK, loc="upper right")


def _figure_map(figure: Any, axes: Any, seen: GradientMap) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgba

    _quiet(axes)
    low, high = seen.span
    cells = [[to_rgba(seen.colour(value) or "none") for value in row] for _, row in seen.layers]
    half = (seen.steps[-1] - seen.steps[0]) / max(1, len(seen.steps) - 1) / 2 or 0.5
    axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        extent=(seen.steps[0] - half, seen.steps[-1] + half, len(seen.layers) - 0.5, -0.5),
    )
    apart = max(1, len(seen.layers) // 40)
    places = [i for i, (name, _) in enumerate(seen.layers) if i % apart == 0 or name in seen.bad]
    axes.set_yticks(places, [clip(seen.layers[i][0], 36) for i in places], parse_math=False)
    for label, place in zip(axes.get_yticklabels(), places):
        label.set_color(FAULT if seen.layers[place][0] in seen.bad else FIGURE_INK)
        label.set_fontsize(8)
    said = "; red: not finite" * bool(seen.bad) + "; grey: exactly zero" * any("zero" in row for _, row in seen.layers)
    axes.set_title(f"gradient norm of each layer{said}", loc="left", fontsize=9.5, color=FIGURE_INK, pad=6)
    from matplotlib.cm import ScalarMappable

    edges = [low + (high - low) * i / len(PALETTE) for i in range(len(PALETTE) + 1)]
    colours = ScalarMappable(BoundaryNorm(edges, len(PALETTE)), ListedColormap(PALETTE))
    bar = figure.colorbar(colours, ax=axes, pad=0.01, aspect=30, ticks=[edges[0], edges[len(edges) // 2], edges[-1]])
    bar.ax.set_yticklabels([f"$10^{{{edges[i]:.1f}}}$" for i in (0, len(edges) // 2, -1)])
    bar.ax.tick_params(colors=FIGURE_INK, labelsize=8, length=0)
    bar.outline.set_visible(False)


def _quiet(axes: Any) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FIGURE_INK, labelsize=8.5, length=3, color=FAINT_INK)
