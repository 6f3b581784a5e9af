"""Losses beside each other, for the figure that people keep: a panel below the other, each curve named at its end."""

from __future__ import annotations

from typing import Any

from nbdebug.views.chart import FAULT
from nbdebug.views.course_figure import FAINT, INK, quiet
from nbdebug.views.curves import Curves, Panel
from nbdebug.views.curves_chart import COLOURS, apart
from nbdebug.views.words import number

STYLES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))


def tall(curves: Curves) -> float:
    """Inches that the picture wants."""
    return 0.5 + 1.9 * len(curves.panels)


def draw(figure: Any, curves: Curves) -> None:
    """Draw into a figure or a part of one."""
    rows = figure.subplots(len(curves.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, curves.panels):
        _panel(axes, panel)
    whole = [value for value, _ in curves.across.ticks(8) if value == int(value)]
    rows[-1].set_xticks(whole, [number(int(value)) for value in whole])
    rows[-1].set_xlim(curves.across.low, curves.across.high)
    rows[-1].set_xlabel("step", fontsize=8.5, color=INK)


def _panel(axes: Any, panel: Panel) -> None:
    quiet(axes)
    scale, ends = panel.scale, []
    for curve, colour, style in zip(panel.curves, COLOURS, STYLES):
        heights = [scale.at(y) for _, y in curve.points]
        axes.plot(
            [x for x, _ in curve.points],
            heights,
            color=colour,
            linestyle=style,
            linewidth=1.3,
            marker="o" * (len(heights) == 1) or None,
        )
        if curve.broke is not None:
            axes.plot(
                curve.points[-1][0], heights[-1], "x", color=FAULT, markersize=7, markeredgewidth=2, clip_on=False
            )
        ends.append(heights[-1])
    for curve, colour, height in zip(panel.curves, COLOURS, apart(ends, 0.12, 0.04, 1.0)):
        axes.annotate(
            curve.label,
            (curve.points[-1][0], height),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
            parse_math=False,
        )
    ticks = scale.ticks()
    axes.set_yticks([scale.at(value) for value, _ in ticks], [said for _, said in ticks])
    axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.8)
    axes.set_ylim(-0.04, 1.04)
    axes.set_title(
        panel.name + " (logarithmic)" * scale.log, loc="left", fontsize=9.5, color=INK, pad=6, parse_math=False
    )
