"""The course of a run: losses and gradient norms over steps, with the steps marked in which a guard did something.

`read` takes the plain facts of a report and gives a Course: what the SVG chart and the matplotlib figure both draw.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.views.plots.histogram import FAINT, FAULT, INK, VALUES, WIDTH
from nbdebug.views.wording import number

OUTCOMES = {
    "tripped": ("not finite, stopped", True),
    "skipped": ("not finite, dropped", True),
    "above": ("norm too large, dropped", False),
    "scaler": ("skipped by GradScaler", False),
}
"""What a mark means, and whether it is a fault; in the order in which they are named."""

_LARGEST, _SMALLEST = 1e300, 1e-300  # beyond them, sums and powers may overflow
Points = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class RunScale:
    """From a value to a height, 0 to 1. log: by the logarithm, where the values span more than a picture can."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            value, low, high = math.log(max(value, self.low)), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, most: int = 4) -> list[tuple[float, str]]:
        """The values to mark, each as a person writes it."""
        return [(value, number(value)) for value in (self._powers(most) if self.log else self._even(most))]

    def _powers(self, most: int) -> list[float]:
        low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**k for k in range(low, high + 1, math.ceil((high - low + 1) / most) or 1)]

    def _even(self, most: int) -> list[float]:
        apart = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        apart *= next((k for k in (1, 2, 5) if (self.high - self.low) / (apart * k) <= most), 10)
        first = math.ceil(self.low / apart - 1e-9)
        values = [(first + n) * apart for n in range(most + 2)]
        return [0.0 if abs(v) < apart / 2 else v for v in values if v <= self.high + apart * 1e-9]

    @classmethod
    def of_steps(cls, first: float, last: float) -> RunScale:
        """The scale of an axis of steps, with room for one at the least."""
        wide = max(1.0, abs(first) * 1e-9)  # one step is lost in a float above 2^53
        return cls(first, max(last, first + wide))

    @classmethod
    def around(cls, values: Sequence[float]) -> RunScale:
        """The scale on which all of these can be told apart."""
        low, high = min(values), max(values)
        if low > _SMALLEST and high / low > 20:
            return cls(_round(low, down=True), _round(high, down=False), True)
        air = max((high - low) * 0.06, abs(high) * 0.01, abs(low) * 0.01) or 1.0  # ticks have four digits
        return cls(0.0 if 0 <= low < air else low - air, high + air)


def _round(value: float, down: bool) -> float:
    """The nearest 1, 2 or 5 times a power of ten that is not above it (down), or not below it."""
    power = 10.0 ** math.floor(math.log10(value))
    return (
        max(k * power for k in (0.5, 1, 2, 5) if k * power <= value)
        if down
        else min(k * power for k in (1, 2, 5, 10, 20) if k * power >= value)
    )


@dataclasses.dataclass(frozen=True)
class RunPlot:
    """losses, norms: (step, value), finite, in order. marks: steps by outcome, one of OUTCOMES; counts: how many there
    were. runs: where a later run begins. joined: the steps are counted on from run to run."""

    losses: Points
    norms: Points
    marks: Mapping[str, tuple[float, ...]]
    counts: Mapping[str, int]
    runs: tuple[float, ...]
    first: float
    last: float
    steps: int
    joined: bool

    @property
    def panels(self) -> list[tuple[str, Points, RunScale]]:
        """What is drawn one below the other."""
        named = (("loss", self.losses), ("gradient norm", self.norms))
        return [(name, points, RunScale.around([y for _, y in points])) for name, points in named if points]

    @property
    def across(self) -> RunScale:
        return RunScale.of_steps(self.first, self.last)

    @property
    def legend(self) -> list[tuple[str, str, bool]]:
        """The marks that there are: the outcome, what is said of it, whether it is a fault."""
        return [
            (key, f"{said}: {_at(self.marks[key], self.counts[key])}", fault)
            for key, (said, fault) in OUTCOMES.items()
            if self.marks.get(key)
        ]

    @property
    def axis(self) -> str:
        return "steps, the runs one after another" if self.joined else "step"

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        said = f"{number(self.steps)} step{'s' * (self.steps != 1)}"
        said += f" in {len(self.runs) + 1} runs" if self.runs else ""
        for name, points, _ in self.panels:
            values = [y for _, y in points]
            said += (
                f"; {name} {number(values[0])} at first, {number(values[-1])} at last, "
                f"between {number(min(values))} and {number(max(values))}"
            )
        return said + "".join(f"; {words}" for _, words, _ in self.legend) + "."


def _at(steps: Sequence[float], count: int, most: int = 4) -> str:
    """ "step 7", "3 steps (7, 9, 12)", "40 steps (7, 9, 12, 15 …)"."""
    if count == 1:
        return f"step {number(int(steps[0]))}"
    shown = ", ".join(number(int(s)) for s in steps[:most])
    return f"{number(count)} steps ({shown}{' …' if count > most else ''})"


def read(given: Mapping[str, Any]) -> RunPlot | None:
    """The picture of these numbers, or None when there is nothing in them to draw."""
    losses, norms = points_of(given.get("losses")), points_of(given.get("norms"))
    places = [x for x, _ in (*losses, *norms)]
    if not places:
        return None
    marks = {key: steps for key in OUTCOMES if (steps := _steps(_member(given, "marks", key)))}
    counts = {key: _count(_member(given, "counts", key), len(steps)) for key, steps in marks.items()}
    places += [x for steps in marks.values() for x in steps]
    return RunPlot(
        losses,
        norms,
        marks,
        counts,
        _steps(given.get("runs")),
        min(places),
        max(places),
        _count(given.get("steps"), len(set(places))),
        given.get("joined") is True,
    )


def _member(given: Mapping[str, Any], key: str, name: str) -> Any:
    inside = given.get(key)
    return inside.get(name) if isinstance(inside, Mapping) else None


def _count(given: Any, least: int) -> int:
    return max(given, least) if isinstance(given, int) else least


def points_of(given: Any) -> Points:
    """The pairs (step, value) of a list that can be drawn, in the order of their steps."""
    pairs = given if isinstance(given, (list, tuple)) else ()
    return tuple(
        sorted(
            (_float(p[0]), _float(p[1]))
            for p in pairs
            if isinstance(p, (list, tuple)) and len(p) == 2 and _drawable(p[0]) and _drawable(p[1])
        )
    )


def _steps(given: Any) -> tuple[float, ...]:
    return tuple(sorted(_float(x) for x in given if _drawable(x))) if isinstance(given, (list, tuple)) else ()


def _drawable(value: Any) -> bool:
    return isinstance(value, numbers.Real) and (isinstance(value, int) or math.isfinite(value))


def _float(value: Any) -> float:
    return float(min(max(value, -_LARGEST), _LARGEST))


LEFT, RIGHT, TOP, GAP = 66, 12, 24, 34
TALL = {"loss": 92, "gradient norm": 66}


def image(course: RunPlot) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    return embedded(svg(course), course.sentence())


def embedded(drawing: str, said: str) -> str:
    """A drawing as an image, with the words for those who do not see it."""
    data = base64.b64encode(drawing.encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(said)}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(course: RunPlot) -> str:
    drawn, top = [], TOP
    for name, points, scale in course.panels:
        drawn += [*_panel(name, points, scale, course, top)]
        top += TALL[name] + GAP
    foot = top - GAP
    drawn += [*_marks(course, TOP, foot), *axis(course.across, foot, course.axis)]
    tall = foot + 36 + 18 * len(course.legend)
    return sheet([*drawn, *_legend(course, foot + 46)], tall)


def sheet(drawn: Sequence[str], tall: float) -> str:
    """The whole drawing, so many pixels tall."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall:g}" width="{WIDTH}" height="{tall:g}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="11.5" '
        f'fill="{INK}">{"".join(drawn)}</svg>'
    )


def _x(course: RunPlot, step: float) -> float:
    return across_at(course.across, step)


def across_at(across: RunScale, step: float, right: float = RIGHT) -> float:
    """Where a step lies. right: the margin, in pixels."""
    return LEFT + across.at(step) * (WIDTH - LEFT - right)


def text(x: float, y: float, said: str, anchor: str = "middle", colour: str = "") -> str:
    filled = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{filled}>{html.escape(said)}</text>'


def _panel(name: str, points: Points, scale: RunScale, course: RunPlot, top: float) -> list[str]:
    """One curve over its horizontal rules."""
    places = [(_x(course, step), top + TALL[name] * (1 - scale.at(value))) for step, value in points]
    return [*rules(name, scale, top, TALL[name]), line(places, VALUES)]


def rules(name: str, scale: RunScale, top: float, tall: float, right: float = RIGHT) -> list[str]:
    """The head of a panel and its horizontal rules, each with its value."""
    drawn = [text(LEFT, top - 9, name + ("  (logarithmic)" if scale.log else ""), "start")]
    for value, said in scale.ticks(4 if tall > 80 else 3):
        y = top + tall * (1 - scale.at(value))
        drawn += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - right:g}" stroke="#80808033" fill="none"/>',
            text(LEFT - 8, y + 4, said, "end"),
        ]
    return drawn


def line(places: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
    """A curve through these places in pixels; a dot where there is only one."""
    if len(places) == 1:
        return f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5" fill="{colour}"/>'
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path d="M{path}" stroke="{colour}" stroke-width="1.3" stroke-linejoin="round" fill="none"{dashed}/>'


def _marks(course: RunPlot, top: float, foot: float) -> list[str]:
    drawn = []
    for start in course.runs:
        x = _x(course, start)
        drawn += [
            f'<path d="M{x:.1f} {top - 4}V{foot}" stroke="{INK}" stroke-dasharray="3 3" fill="none"/>',
            text(x, top - 9, "new run"),
        ]
    for outcome, _, fault in course.legend:
        places = sorted({round(_x(course, step)) for step in course.marks[outcome]})  # no two in one column
        drawn.append(_lines(places, top, foot) if fault else _triangles(places, foot))
    return drawn


def _lines(places: list[int], top: float, foot: float) -> str:
    path = "".join(f"M{x} {top}V{foot}" for x in places)
    return f'<path d="{path}" stroke="{FAULT}" stroke-width="1.5" fill="none"/>'


def _triangles(places: list[int], foot: float) -> str:
    path = "".join(f"M{x - 4} {foot}h8l-4 -7z" for x in places)
    return f'<path d="{path}" fill="{INK}"/>'


def axis(across: RunScale, foot: float, name: str, right: float = RIGHT) -> list[str]:
    """The steps, along the foot of the last panel."""
    drawn = [f'<path d="M{LEFT} {foot:g}H{WIDTH - right:g}" stroke="{INK}" fill="none"/>']
    for value, _ in across.ticks(6):
        if value == int(value):
            x = across_at(across, value, right)
            drawn += [
                f'<path d="M{x:.1f} {foot:g}v4" stroke="{FAINT}" fill="none"/>',
                text(x, foot + 17, number(int(value)), "end" if x > WIDTH - right - 20 else "middle"),
            ]
    return [*drawn, text(WIDTH - right, foot + 31, name, "end")]


def _legend(course: RunPlot, top: float) -> list[str]:
    drawn = []
    for row, (_, said, fault) in enumerate(course.legend):
        y = top + 18 * row
        drawn += [
            _lines([LEFT + 4], y - 10, y + 2) if fault else _triangles([LEFT + 4], y + 1),
            text(LEFT + 16, y, said, "start"),
        ]
    return drawn


FIGURE_INK, FAINT_INK = "#808080", "#a0a0a0"


def draw(figure: Any, course: RunPlot) -> None:
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
        axes.grid(axis="y", color=FAINT_INK, alpha=0.3, linewidth=0.8)
        axes.set_ylim(-0.02, 1.04)
        axes.set_title(name + " (logarithmic)" * scale.log, loc="left", fontsize=9.5, color=FIGURE_INK, pad=6)
        _figure_marks(axes, course)
        axes.tick_params(axis="x", length=0)
    last = rows[-1, 0]
    last.tick_params(axis="x", length=3)
    _dropped(last, course)
    last.spines["bottom"].set_visible(True)
    last.spines["bottom"].set_color(FIGURE_INK)
    last.set_xlabel(course.axis, fontsize=8.5, color=FIGURE_INK)
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
            color=FAULT if fault else FIGURE_INK,
            annotation_clip=False,
        )


def _figure_marks(axes: Any, course: RunPlot) -> None:
    for start in course.runs:
        axes.axvline(start, color=FIGURE_INK, linestyle=(0, (4, 3)), linewidth=1)
    for outcome, _, fault in course.legend:
        if fault:
            axes.vlines(list(course.marks[outcome]), 0, 1, color=FAULT, linewidth=1.3, clip_on=False)


def _dropped(axes: Any, course: RunPlot) -> None:
    """Steps that were dropped without a fault, at the foot of the last panel."""
    for outcome, _, fault in course.legend:
        if not fault:
            steps = course.marks[outcome]
            axes.plot(steps, [-0.02] * len(steps), "^", color=FIGURE_INK, markersize=5, clip_on=False)


def quiet(axes: Any) -> None:
    """Nothing but what is drawn into them."""
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FIGURE_INK, labelsize=8.5, length=3, color=FAINT_INK)
