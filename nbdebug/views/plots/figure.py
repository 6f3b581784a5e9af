"""The picture of a finding that people keep: what sizes the guilty values had, and which way the bad one went.

Left, close up, how many values have which binary exponent, with those at fault marked; below it, from far, where these
exponents lie between the ends of each floating point type. Right, the module tree with the way of the non-finite value
from where it was made. Above, where the facts have it, the course of the run. Drawn through `Figure`, never through
pyplot, so that no state of the user's is touched. The ground is transparent and the colours are midway, so that it can
be read on light and on dark pages.
"""

from __future__ import annotations

import dataclasses
import io
import textwrap
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from nbdebug.report import Report
from nbdebug.views import wording as words
from nbdebug.views.plots import gradients as watch
from nbdebug.views.plots import gradients as watch_figure
from nbdebug.views.plots import histogram as exponents
from nbdebug.views.plots import losses as curves
from nbdebug.views.plots import losses as curves_figure
from nbdebug.views.plots import memory, ranges
from nbdebug.views.plots import memory as memory_figure
from nbdebug.views.plots import ranges as ranges_figure
from nbdebug.views.plots import run as course
from nbdebug.views.plots import run as course_figure
from nbdebug.views.plots.histogram import FAULT, SPANS, VALUES, Histogram
from nbdebug.views.wording import clean


@dataclasses.dataclass(frozen=True)
class ModuleLine:
    """One module, or, where `more` is not 0, so many modules that are not shown."""

    depth: int
    name: str = ""
    kind: str = ""
    born: bool = False
    path: bool = False
    more: int = 0


def prune(facts: Mapping[str, Any], most: int = 18) -> list[ModuleLine]:
    """The lines to draw; none when the facts do not say where a bad value went."""
    given = facts.get("tree")
    nodes = [n for n in given if isinstance(n, Mapping)] if isinstance(given, (list, tuple)) else []
    if not any(n.get("born") or n.get("path") for n in nodes):
        return []
    parents = _parents([str(n.get("name", "")) for n in nodes])
    shown = _shown(nodes, parents, most)
    depths = _depths(parents)
    lines: list[ModuleLine] = []
    hidden: list[int] = []
    for i in range(len(nodes)):
        if i not in shown:
            hidden.append(i)
            continue
        lines += [*_rest(nodes, hidden, parents, depths), _line(i, nodes, parents, depths)]
        hidden = []
    return lines + _rest(nodes, hidden, parents, depths)


def _parents(names: list[str]) -> list[int | None]:
    """The index of the nearest module above each, None at the top."""
    at = {name: i for i, name in reversed(list(enumerate(names)))}
    parents: list[int | None] = []
    for i, name in enumerate(names):
        above = name
        while above:
            above = above.rpartition(".")[0]
            if above in at and at[above] < i:
                break
        parents.append(at[above] if name and at.get(above, i) < i else None)
    return parents


def _depths(parents: list[int | None]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
    return depths


def _shown(nodes: list[Any], parents: list[int | None], most: int) -> set[int]:
    """Which modules get a line: all if they fit; else the birth, then its path by nearness, and what is above these."""
    if len(nodes) <= most:
        return set(range(len(nodes)))
    born = [i for i, n in enumerate(nodes) if n.get("born")] or [i for i, n in enumerate(nodes) if n.get("path")][:1]
    path = [i for i, n in enumerate(nodes) if n.get("path") and i not in born]
    nearest = sorted(path, key=lambda i: min(abs(i - b) for b in born))
    shown: set[int] = set()
    for i in [*born, *nearest]:
        line: set[int] = set()
        above: int | None = i
        while above is not None:
            line.add(above)
            above = parents[above]
        if len(shown | line) <= max(most * 2 // 3, 1) or not shown:  # the other third is for the "N more" lines
            shown |= line
    return shown


def _rest(nodes: list[Any], hidden: list[int], parents: list[int | None], depths: list[int]) -> list[ModuleLine]:
    """The line that stands for hidden modules; a single one is shown itself, as it takes no more room."""
    if len(hidden) < 2:
        return [_line(i, nodes, parents, depths) for i in hidden]
    return [
        ModuleLine(min(depths[i] for i in hidden), path=any(nodes[i].get("path") for i in hidden), more=len(hidden))
    ]


def _line(i: int, nodes: list[Any], parents: list[int | None], depths: list[int]) -> ModuleLine:
    name, parent = str(nodes[i].get("name", "")), parents[i]
    above = str(nodes[parent].get("name", "")) if parent is not None else ""
    shown = name[len(above) :].lstrip(".") if above else name
    born = bool(nodes[i].get("born"))
    return ModuleLine(
        depths[i],
        clean(shown or "the model", 40),
        clean(nodes[i].get("type") or "", 40),
        born,
        born or bool(nodes[i].get("path")),
    )


INK, FAINT = "#808080", "#a0a0a0"
PIXELS = 96
"""To an inch, as notebooks show it."""
HEAD: dict[str, Any] = {"loc": "left", "fontsize": 9.5, "color": INK, "parse_math": False, "pad": 8}

ALONE: Any = (
    (watch, watch_figure, 9.0),
    (memory, memory_figure, 8.0),
    (curves, curves_figure, 8.0),
    (ranges, ranges_figure, 8.5),
)
"""What is a picture of its own, how it is drawn, and how wide, in inches."""


class Picture(Figure):
    """A Figure that notebooks show by itself, also where pyplot, which teaches them to, was never imported."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=2 * PIXELS)  # twice as fine as it is shown, for screens that can
        wide, tall = self.get_size_inches() * PIXELS
        return data.getvalue(), {"width": round(wide), "height": round(tall)}


def draw(report: Report) -> Figure:
    """Raises ValueError when the report has nothing to draw."""
    for part, picture, wide in ALONE:
        shown = part.read(report.facts)
        if shown is not None:
            figure = _empty(wide, picture.tall(shown) + 0.5 * bool(report.findings), report)
            picture.draw(figure, shown)
            return figure
    seen, lines, run = exponents.read(report.facts), prune(report.facts), course.read(report.facts)
    if seen is None and not lines and run is None:
        raise ValueError(
            "This report has nothing to draw: "
            + (
                "nothing was found."
                if report.ok
                else "neither the values at fault nor the way of the bad one were kept."
            )
        )
    wide = max(5.8 * (seen is not None) + 4.2 * bool(lines), 8.0 * (run is not None))
    found = max(4.4, 1.5 + 0.235 * len(lines)) if seen or lines else 0.6
    above = 3.9 if run else 0.0
    figure = _empty(wide, found + above, report)
    if run is None:
        _draw_found(figure, seen, lines)
    elif seen or lines:
        parts: Any = figure.subfigures(2, 1, height_ratios=[above, found])
        course_figure.draw(parts[0], run)
        _draw_found(parts[1], seen, lines)
    else:
        course_figure.draw(figure, run)
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


def _draw_found(figure: Any, seen: Histogram | None, lines: list[ModuleLine]) -> None:
    """The values at fault, the way of the bad one, or both side by side."""
    halves: Any = figure.subfigures(1, 2, width_ratios=[5.8, 4.2]) if seen and lines else [figure, figure]
    if seen:
        close, far = halves[0].subplots(2, 1, height_ratios=[3, 0.34 * (len(seen.dtypes) + 1)])
        _close(close, seen)
        _far(far, seen)
    if lines:
        _tree(halves[1].subplots(), lines)


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


def _tree(axes: Any, lines: list[ModuleLine]) -> None:
    axes.set_axis_off()
    axes.set_facecolor("none")
    axes.set_xlim(0, 1)
    axes.set_ylim(max(len(lines), 14) - 0.2, -0.8)
    on_path = [row for row, line in enumerate(lines) if line.path]
    axes.plot([0.03, 0.03], [on_path[0], on_path[-1]], color=FAULT, linewidth=1.5, alpha=0.6)
    for row, line in enumerate(lines):
        x = 0.08 + 0.045 * line.depth
        if line.more:
            axes.text(x, row, f"… {line.more} more", va="center", fontsize=9, color=INK, style="italic")
            continue
        if line.path:
            axes.plot(0.03, row, "o", markersize=8 if line.born else 5, color=FAULT, clip_on=False)
        name = axes.text(
            x,
            row,
            words.clip(line.name, 34),
            va="center",
            fontsize=9.5,
            parse_math=False,
            color=FAULT if line.path else INK,
            fontweight="bold" if line.born else "normal",
        )
        kind = ("made here   " if line.born else "") + words.clip(line.kind, 26)
        axes.annotate(
            kind,
            (1, 0.5),
            xycoords=name,
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=FAULT if line.born else INK,
            annotation_clip=False,
            parse_math=False,
        )
    for text in axes.texts:
        text.set_in_layout(False)  # a long name runs out of the picture rather than squeezing it
    axes.set_title("Where the non-finite value was made, and where it went", **HEAD)
