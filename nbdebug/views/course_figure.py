"""The course of a run for the figure that people keep: loss above, gradient norm below, the marked steps named."""

from __future__ import annotations

from typing import Any

from nbdebug.views.chart import FAULT, VALUES
from nbdebug.views.course import Course
from nbdebug.views.words import number

INK, FAINT = "#808080", "#a0a0a0"


def draw(figure: Any, course: Course) -> None:
    """Draw into a figure or a part of one."""
    panels = course.panels
    ratios = [1.4 if name == "loss" else 1 for name, _, _ in panels]
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for axes, (name, points, scale) in zip(rows[:, 0], panels):
        quiet(axes)
        heights = [scale.at(y) for _, y in points]
        axes.plot([x for x, _ in points], heights, color=VALUES, linewidth=1.2, marker="o" * (len(points) == 1) or None)
        ticks = scale.ticks()
        axes.set_yticks([scale.at(value) for value, _ in ticks], [said for _, said in ticks])
        axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.8)
        axes.set_ylim(-0.02, 1.04)
        axes.set_title(name + " (logarithmic)" * scale.log, loc="left", fontsize=9.5, color=INK, pad=6)
        _marks(axes, course)
        axes.tick_params(axis="x", length=0)
    last = rows[-1, 0]
    last.tick_params(axis="x", length=3)
    _dropped(last, course)
    last.spines["bottom"].set_visible(True)
    last.spines["bottom"].set_color(INK)
    last.set_xlabel(course.axis, fontsize=8.5, color=INK)
    whole = [value for value, _ in course.across.ticks(8) if value == int(value)]
    last.set_xticks(whole, [number(int(value)) for value in whole])
    last.set_xlim(course.across.low, course.across.high)
    for row, (_, said, fault) in enumerate(course.legend):
        last.annotate(
            ("| " if fault else "▲ ") + said,
            (0, 0),
            xycoords="axes fraction",
            xytext=(0, -34 - 14 * row),
            textcoords="offset points",
            fontsize=9,
            color=FAULT if fault else INK,
            annotation_clip=False,
        )


def _marks(axes: Any, course: Course) -> None:
    for start in course.runs:
        axes.axvline(start, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    for outcome, _, fault in course.legend:
        if fault:
            axes.vlines(list(course.marks[outcome]), 0, 1, color=FAULT, linewidth=1.3, clip_on=False)


def _dropped(axes: Any, course: Course) -> None:
    """Steps that were dropped without a fault, at the foot of the last panel."""
    for outcome, _, fault in course.legend:
        if not fault:
            steps = course.marks[outcome]
            axes.plot(steps, [-0.02] * len(steps), "^", color=INK, markersize=5, clip_on=False)


def quiet(axes: Any) -> None:
    """Nothing but what is drawn into them."""
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5, length=3, color=FAINT)
