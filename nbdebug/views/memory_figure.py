"""Where memory is, for the figure that people keep: the parts as bars, and live memory over the step."""

from __future__ import annotations

from typing import Any

from nbdebug.sizes import size
from nbdebug.views.chart import FAULT, VALUES
from nbdebug.views.memory import COLOURS, Memory

INK, FAINT = "#808080", "#a0a0a0"


def tall(memory: Memory) -> float:
    """Inches."""
    return sum(_rows(memory))


def _rows(memory: Memory) -> list[float]:
    bars = len(memory.parts) + bool(memory.limit)
    return [0.9 + 0.28 * bars] * bool(memory.parts) + [2.6] * bool(memory.course)


def draw(figure: Any, memory: Memory) -> None:
    """Draw into a figure or a part of one."""
    rows = _rows(memory)
    axes = list(figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0])
    if memory.parts:
        _parts(axes.pop(0), memory)
    if memory.course:
        _course(axes.pop(0), memory)


def _parts(axes: Any, memory: Memory) -> None:
    _quiet(axes)
    places = list(range(len(memory.parts)))
    counts = [count for _, count in memory.parts]
    axes.barh(places, counts, height=0.62, color=[COLOURS[i % len(COLOURS)] for i in places])
    for place, count in zip(places, counts):
        axes.text(count, place, f"  {size(count)}", va="center", fontsize=8.5, color=INK)
    labels = [label for label, _ in memory.parts]
    if memory.limit:
        labels.append("in all")
        places.append(len(places))
        axes.barh(
            [places[-1]] * len(counts),
            counts,
            left=[sum(counts[:i]) for i in range(len(counts))],
            height=0.62,
            color=[COLOURS[i % len(COLOURS)] for i in range(len(counts))],
        )
        axes.text(sum(counts), places[-1], f"  {size(memory.total)}", va="center", fontsize=8.5, color=INK)
    axes.set_yticks(places, labels, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xticks([])
    whole = max(memory.limit or 0, memory.total if memory.limit else 0, *counts)
    axes.set_xlim(0, whole * 1.15)
    over = memory.limit is not None and memory.total > memory.limit
    said = f"{memory.title}: {size(memory.total)}"
    if memory.limit:
        said += f" of {size(memory.limit)}" + (", more than there is" if over else "")
        axes.axvline(memory.limit, color=FAULT if over else INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_title(said, loc="left", fontsize=9.5, color=FAULT if over else INK, pad=8, parse_math=False)


def _course(axes: Any, memory: Memory) -> None:
    _quiet(axes)
    across, up = zip(*memory.course)
    axes.fill_between(across, up, color=VALUES, alpha=0.28, linewidth=0)
    axes.plot(across, up, color=VALUES, linewidth=1.2)
    high = memory.peak[1]
    for name, at in memory.phases:
        axes.axvline(at, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(
            name,
            (at, 0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
        )
    axes.plot(*memory.peak, "o", color=FAULT, markersize=5)
    late = memory.peak[0] > across[0] + 0.75 * (across[-1] - across[0])
    axes.annotate(
        f"peak {size(high)}",
        memory.peak,
        xytext=(-6 if late else 6, 4),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=9,
        color=FAULT,
        fontweight="bold",
    )
    marks = memory.marks(5)
    axes.set_yticks(marks, [size(value) if value else "0" for value in marks])
    axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.8)
    axes.set_ylim(0, high * 1.12)
    axes.set_xlim(across[0], across[-1])
    axes.set_title("live memory over one step", loc="left", fontsize=9.5, color=INK, pad=6)
    axes.set_xlabel(memory.axis, fontsize=8.5, color=INK)


def _quiet(axes: Any) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5, length=3, color=FAINT)
