"""The course of a run as an SVG inside an <img>, which untrusted notebooks keep: loss above, gradient norm below.

A step that was not finite is a line from top to bottom; one that was dropped for another reason is a small triangle at
the foot. Both are named in words under the picture, so that nothing hangs on the colour. Ground and colours as in
`chart.py`.
"""

from __future__ import annotations

import base64
import html

from nbdebug.views.chart import FAINT, FAULT, INK, VALUES, WIDTH
from nbdebug.views.course import Course, Points, Scale
from nbdebug.views.words import number

LEFT, RIGHT, TOP, GAP = 66, 12, 24, 34
TALL = {"loss": 92, "gradient norm": 66}


def image(course: Course) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`."""
    data = base64.b64encode(svg(course).encode()).decode()
    return (f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(course.sentence())}" '
            f'width="{WIDTH}" style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">')


def svg(course: Course) -> str:
    drawn, top = [], TOP
    for name, points, scale in course.panels:
        drawn += [*_panel(name, points, scale, course, top)]
        top += TALL[name] + GAP
    foot = top - GAP
    drawn += [*_marks(course, TOP, foot), *_axis(course, foot)]
    tall = foot + 36 + 18 * len(course.legend)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}" '
            f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="11.5" '
            f'fill="{INK}">{"".join([*drawn, *_legend(course, foot + 46)])}</svg>')


def _x(course: Course, step: float) -> float:
    return LEFT + course.across.at(step) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _panel(name: str, points: Points, scale: Scale, course: Course, top: float) -> list[str]:
    """One curve over its horizontal rules."""
    tall = TALL[name]
    drawn = [_text(LEFT, top - 9, name + ("  (logarithmic)" if scale.log else ""), "start")]
    for value, said in scale.ticks(4 if tall > 80 else 3):
        y = top + tall * (1 - scale.at(value))
        drawn += [f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#80808033" fill="none"/>',
                  _text(LEFT - 8, y + 4, said, "end")]
    places = [(_x(course, step), top + tall * (1 - scale.at(value))) for step, value in points]
    if len(places) == 1:
        return [*drawn, f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5" fill="{VALUES}"/>']
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return [*drawn, f'<path d="M{path}" stroke="{VALUES}" stroke-width="1.3" stroke-linejoin="round" fill="none"/>']


def _marks(course: Course, top: float, foot: float) -> list[str]:
    drawn = []
    for start in course.runs:
        x = _x(course, start)
        drawn += [f'<path d="M{x:.1f} {top - 4}V{foot}" stroke="{INK}" stroke-dasharray="3 3" fill="none"/>',
                  _text(x, top - 9, "new run")]
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


def _axis(course: Course, foot: float) -> list[str]:
    drawn = [f'<path d="M{LEFT} {foot}H{WIDTH - RIGHT}" stroke="{INK}" fill="none"/>']
    for value, _ in course.across.ticks(6):
        if value == int(value):
            x = _x(course, value)
            drawn += [f'<path d="M{x:.1f} {foot}v4" stroke="{FAINT}" fill="none"/>',
                      _text(x, foot + 17, number(int(value)), "end" if x > WIDTH - RIGHT - 20 else "middle")]
    return [*drawn, _text(WIDTH - RIGHT, foot + 31, course.axis, "end")]


def _legend(course: Course, top: float) -> list[str]:
    drawn = []
    for row, (_, said, fault) in enumerate(course.legend):
        y = top + 18 * row
        drawn += [_lines([LEFT + 4], y - 10, y + 2) if fault else _triangles([LEFT + 4], y + 1),
                  _text(LEFT + 16, y, said, "start")]
    return drawn
