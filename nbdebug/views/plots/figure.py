"""The picture of a finding that people keep: what sizes the guilty values had, and which way the bad one went.

Left, close up, how many values have which binary exponent, with those at fault marked; below it, from far, where these
exponents lie between the ends of each floating point type. Right, the module tree with the way of the non-finite value
from where it was made. Above, where the facts have it, the course of the run. Drawn through `Figure`, never through
pyplot, so that no state of the user's is touched. The ground is transparent and the colours are midway, so that it can
be read on light and on dark pages.
"""

from __future__ import annotations

import io
import textwrap
from typing import Any

from matplotlib.figure import Figure

from nbdebug.report import Report
from nbdebug.views import wording as words
from nbdebug.views.plots import histogram as exponents
from nbdebug.views.plots import pictures
from nbdebug.views.plots.histogram import FAULT, SPANS, VALUES, Histogram

INK, FAINT = "#808080", "#a0a0a0"
PIXELS = 96
"""To an inch, as notebooks show it."""
HEAD: dict[str, Any] = {"loc": "left", "fontsize": 9.5, "color": INK, "parse_math": False, "pad": 8}

WIDTHS = {"gradients": 9.0, "memory": 8.0, "losses": 8.0, "ranges": 8.5}
"""Pictures that fill a figure of their own, and how wide, in inches."""


class Picture(Figure):
    """A Figure that notebooks show by itself, also where pyplot, which teaches them to, was never imported."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=2 * PIXELS)  # twice as fine as it is shown, for screens that can
        wide, tall = self.get_size_inches() * PIXELS
        return data.getvalue(), {"width": round(wide), "height": round(tall)}


def draw(report: Report) -> Figure:
    """Raises ValueError when the report has nothing to draw."""
    for kind, module, picture in pictures(report, *WIDTHS):
        figure = _empty(WIDTHS[kind], module.tall(picture) + 0.5 * bool(report.findings), report)
        module.draw(figure, picture)
        return figure
    drawn = {kind: (module, picture) for kind, module, picture in pictures(report, "histogram", "tree", "run")}
    seen, lines, run = (drawn.get(kind, (None, None))[1] for kind in ("histogram", "tree", "run"))
    if not drawn:
        raise ValueError(
            "This report has nothing to draw: "
            + (
                "nothing was found."
                if report.ok
                else "neither the values at fault nor the way of the bad one were kept."
            )
        )
    wide = max(5.8 * (seen is not None) + 4.2 * bool(lines), 8.0 * (run is not None))
    found = max(4.4, 1.5 + 0.235 * len(lines or ())) if seen or lines else 0.6
    above = 3.9 if run else 0.0
    figure = _empty(wide, found + above, report)
    if run is None:
        _draw_found(figure, seen, drawn.get("tree"))
    elif seen or lines:
        parts: Any = figure.subfigures(2, 1, height_ratios=[above, found])
        drawn["run"][0].draw(parts[0], run)
        _draw_found(parts[1], seen, drawn.get("tree"))
    else:
        drawn["run"][0].draw(figure, run)
    return figure


def _empty(wide: float, tall: float, report: Report) -> Figure:
    """A Figure of this size in inches, with the finding's sentence above."""
    figure = Picture(figsize=(wide, tall), facecolor="none")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06)
    if report.findings:
        title = words.clean(report.findings[0].title.replace("`", ""), 300)
        figure.suptitle(
            "\n".join(textwrap.wrap(title, int(wide * 10.5))),
            x=0.015,
            ha="left",
            fontsize=11.5,
            fontweight="bold",
            color=INK,
            parse_math=False,
        )
    return figure


def _draw_found(figure: Any, seen: Histogram | None, tree: Any) -> None:
    """The values at fault, the way of the bad one, or both side by side."""
    halves: Any = figure.subfigures(1, 2, width_ratios=[5.8, 4.2]) if seen and tree else [figure, figure]
    if seen:
        close, far = halves[0].subplots(2, 1, height_ratios=[3, 0.34 * (len(seen.dtypes) + 1)])
        _close(close, seen)
        _far(far, seen)
    if tree:
        module, lines = tree
        module.draw(halves[1].subplots(), lines)


def _quiet(axes: Any) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5, length=3, color=FAINT)


def _close(axes: Any, seen: Histogram) -> None:
    low, high = seen.window
    _quiet(axes)
    levels = {exponents.height(n, seen.tallest): words.number(n) for n in exponents.levels(seen.tallest)}
    axes.hlines(list(levels), low, high + 1, color=FAINT, alpha=0.3, linewidth=0.8)
    for bar in seen.bars:
        x, wide = (bar.first + bar.last + 1) / 2, (bar.last + 1 - bar.first) * 0.88
        axes.bar(x, exponents.height(bar.count, seen.tallest), wide, color=VALUES, zorder=2)
        if bar.bad:
            axes.bar(x, exponents.height(bar.bad, seen.tallest), wide, color=FAULT, zorder=2)
    axes.set_xlim(*_specials(axes, seen))
    axes.set_ylim(0, 1.2)
    marks = exponents.ticks(seen.window, 12)
    axes.set_xticks(marks, [f"$2^{{{e}}}$" for e in marks])
    axes.set_yticks(list(levels), list(levels.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"Sizes of the values: {seen.operand} ({seen.dtype})", **HEAD)
    axes.set_ylabel("how many", fontsize=8.5, color=INK)
    axes.plot([low, high + 1], [0, 0], color=INK, linewidth=1, clip_on=False)
    _marks(axes, seen)


def _specials(axes: Any, seen: Histogram) -> tuple[float, float]:
    """Zeros left of the finite values, infinities and NaN right, a gap between; returns the sides of the whole."""
    low, high = seen.window
    slot = (high + 1 - low) * 0.085
    left, right = float(low), float(high + 1)
    for special in seen.specials:
        if special.name == "zero":
            left -= slot * 1.25
            x = left + slot / 2
        else:
            x = right + slot * 0.75
            right += slot
        tall, colour = exponents.height(special.count, seen.tallest), FAULT if special.bad else VALUES
        axes.bar(x, tall, slot * 0.5, color=colour)
        axes.text(
            x, tall + 0.02, words.number(special.count), ha="center", fontsize=8.5, color=colour, fontweight="bold"
        )
        axes.text(x, -0.045, special.name, ha="center", va="top", fontsize=8.5, color=INK)
        axes.plot([x - slot / 2, x + slot / 2], [0, 0], color=INK, linewidth=1, clip_on=False)
    return left, right + slot * 0.25 * (right > high + 1)


def _marks(axes: Any, seen: Histogram) -> None:
    """Dashed lines where the close view shows the end of a type, and what the colour of the fault means."""
    low, high = seen.window
    named: dict[int, list[str]] = {}
    for dtype in seen.dtypes:
        for edge in (SPANS[dtype].subnormal, SPANS[dtype].largest + 1):
            if low < edge <= high:
                named.setdefault(edge, []).append(dtype)
    for edge, dtypes in named.items():
        axes.plot([edge, edge], [0, 1.08], color=INK, linestyle=(0, (4, 3)), linewidth=1)
        axes.text(edge, 1.1, "end of " + ", ".join(dtypes), ha="center", fontsize=8.5, color=INK)
    if seen.bad:
        axes.text(
            1,
            1.2,
            f"at fault: {words.number(seen.bad)}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="top",
            fontsize=9,
            color=FAULT,
            fontweight="bold",
        )


def _far(axes: Any, seen: Histogram) -> None:
    """One strip for each type: thin where its numbers are subnormal; the band shows where the values are."""
    _quiet(axes)
    for row, dtype in enumerate(seen.dtypes):
        span, own = SPANS[dtype], dtype == seen.dtype
        axes.plot([span.subnormal, span.normal], [row, row], color=FAINT, linewidth=2, solid_capstyle="butt")
        axes.plot(
            [span.normal, span.largest + 1], [row, row], color=INK if own else FAINT, linewidth=6, solid_capstyle="butt"
        )
        axes.text(span.subnormal, row, span.least + "  ", ha="right", va="center", fontsize=8.5, color=INK)
        axes.text(span.largest + 1, row, "  " + span.most, ha="left", va="center", fontsize=8.5, color=INK)
    if seen.bars:
        axes.axvspan(seen.low, seen.high + 1, color=VALUES, alpha=0.35, linewidth=1.5)
    low, high = seen.range
    axes.set_xlim(low - (high - low) * 0.17, high + (high - low) * 0.13)
    axes.set_ylim(len(seen.dtypes) - 0.4, -0.6)
    axes.set_yticks(range(len(seen.dtypes)), seen.dtypes)
    for label, dtype in zip(axes.get_yticklabels(), seen.dtypes):
        label.set_fontweight("bold" if dtype == seen.dtype else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.set_title("What each type can hold" + "; the band is where these values lie" * bool(seen.bars), **HEAD)
