"""Modules against the ends of a half precision type, for the figure that people keep."""

from __future__ import annotations

from typing import Any

from nbdebug.views.chart import FAULT, VALUES
from nbdebug.views.ranges import Ranges
from nbdebug.views.ranges_chart import GRADIENT
from nbdebug.views.words import clip

INK, FAINT = "#808080", "#a0a0a0"


def tall(ranges: Ranges) -> float:
    """Inches."""
    return 1.5 + 0.22 * len(ranges.lines)


def draw(figure: Any, ranges: Ranges) -> None:
    """Draw into a figure or a part of one."""
    axes = figure.subplots()
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5, length=3, color=FAINT)
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
            axes.axvline(power, color=INK, linestyle=(0, (4, 3)), linewidth=1)
            axes.annotate(
                said,
                (power, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="left" if power > 0 else "right",
                fontsize=8.5,
                color=INK,
            )
    axes.set_yticks(range(len(ranges.lines)), [clip(line.name, 30) for line in ranges.lines], parse_math=False)
    for label, line in zip(axes.get_yticklabels(), ranges.lines):
        label.set_color(FAULT if line.kept else INK)
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
        color=INK,
    )
    axes.set_title(
        f"Sizes of each module's values, against what {ranges.dtype} can hold",
        loc="left",
        fontsize=9.5,
        color=INK,
        pad=18,
    )


def _whole() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=9, integer=True)
