"""The course of a run as an SVG inside an <img>, which untrusted notebooks keep: loss above, gradient norm below.

A step that was not finite is a line from top to bottom; one that was dropped for another reason is a small triangle at
the foot. Both are named in words under the picture, so that nothing hangs on the colour. Ground and colours as in
`chart.py`.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from nbdebug.views.chart import FAINT, FAULT, INK, VALUES, WIDTH
from nbdebug.views.course import Course, Points, Scale
from nbdebug.views.words import number

LEFT, RIGHT, TOP, GAP = 66, 12, 24, 34
TALL = {"loss": 92, "gradient norm": 66}


def image(course: Course) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    return embedded(svg(course), course.sentence())


def embedded(drawing: str, said: str) -> str:
    """A drawing as an image, with the words for those who do not see it."""
    data = base64.b64encode(drawing.encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(said)}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(course: Course) -> str:
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


def _x(course: Course, step: float) -> float:
    return across_at(course.across, step)


def across_at(across: Scale, step: float, right: float = RIGHT) -> float:
    """Where a step lies. right: the margin, in pixels."""
    return LEFT + across.at(step) * (WIDTH - LEFT - right)


def text(x: float, y: float, said: str, anchor: str = "middle", colour: str = "") -> str:
    filled = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{filled}>{html.escape(said)}</text>'


def _panel(name: str, points: Points, scale: Scale, course: Course, top: float) -> list[str]:
    """One curve over its horizontal rules."""
    places = [(_x(course, step), top + TALL[name] * (1 - scale.at(value))) for step, value in points]
    return [*rules(name, scale, top, TALL[name]), line(places, VALUES)]


def rules(name: str, scale: Scale, top: float, tall: float, right: float = RIGHT) -> list[str]:
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


def _marks(course: Course, top: float, foot: float) -> list[str]:
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


def axis(across: Scale, foot: float, name: str, right: float = RIGHT) -> list[str]:
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


def _legend(course: Course, top: float) -> list[str]:
    drawn = []
    for row, (_, said, fault) in enumerate(course.legend):
        y = top + 18 * row
        drawn += [
            _lines([LEFT + 4], y - 10, y + 2) if fault else _triangles([LEFT + 4], y + 1),
            text(LEFT + 16, y, said, "start"),
        ]
    return drawn
