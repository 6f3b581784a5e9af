"""The pictures of a report as one matplotlib Figure, drawn through `Figure` and never through pyplot, so that no state
of the user's is touched. The marks are those of the SVG, an inch to PIXELS of them."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbdebug.report import Report
from nbdebug.views.plots.marks import INK, WIDTH, Areas, Bar, Dot, Lines, Mark, Text
from nbdebug.views.wording import clean

PIXELS = 96
"""To an inch, as notebooks show it."""
MARGIN, TITLE = 14, 19
"""Around the pictures and between them; of a line of the title."""
POINTS = 72 / PIXELS
ANCHORS = {"start": "left", "middle": "center", "end": "right"}


class Picture(Figure):
    """A Figure that notebooks show by itself, also where pyplot, which teaches them to, was never imported."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=2 * PIXELS)  # twice as fine as it is shown, for screens that can
        wide, tall = self.get_size_inches() * PIXELS
        return data.getvalue(), {"width": round(wide), "height": round(tall)}


def draw(report: Report) -> Figure:
    """Raises ValueError when the report has nothing to draw."""
    drawings = {kind: picture.drawing() for kind, picture in report._pictures()}
    if not drawings:
        why = "nothing was found." if not report.findings else "neither the values at fault nor their path were kept."
        raise ValueError(f"This report has nothing to draw: {why}")
    tree = drawings.pop("tree", None)
    beside = tree is not None and "histogram" in drawings  # the tree stands right of the values
    if tree is not None and not beside:
        drawings["tree"] = tree
    wide = (WIDTH + tree.width if beside and tree else WIDTH) + 2 * MARGIN
    finding = report.findings[0].title.replace("`", "") if report.findings else ""
    title = textwrap.wrap(clean(finding, 300), int(wide / 8.4))
    top, places = MARGIN + TITLE * len(title), []
    for kind, drawing in drawings.items():
        places.append((drawing, MARGIN, top))
        tall = drawing.height
        if kind == "histogram" and beside and tree is not None:
            places.append((tree, WIDTH + 2 * MARGIN, top))
            tall = max(tall, tree.height)
        top += tall + MARGIN
    figure = Picture(figsize=(wide / PIXELS, top / PIXELS), facecolor="none")
    for row, text in enumerate(title):
        y = 1 - (MARGIN + TITLE * (row + 0.5)) / top
        figure.text(MARGIN / wide, y, text, fontsize=11.5, fontweight="bold", color=INK, parse_math=False)
    for drawing, left, above in places:
        box = (left / wide, 1 - (above + drawing.height) / top, drawing.width / wide, drawing.height / top)
        axes = figure.add_axes(box, xlim=(0, drawing.width), ylim=(drawing.height, 0), facecolor="none")
        axes.set_axis_off()
        for mark in drawing.marks:
            _draw(axes, mark)
    return figure


def _draw(axes: Any, mark: Mark) -> None:
    if isinstance(mark, Lines):
        width = mark.width * POINTS
        dash = (0, [length / mark.width for length in mark.dash]) if mark.dash else "solid"
        axes.add_collection(
            LineCollection(list(mark.paths), colors=mark.colour, linewidths=width, linestyles=[dash], clip_on=False),
            autolim=False,
        )
    elif isinstance(mark, Areas):
        axes.add_collection(PolyCollection(list(mark.paths), facecolors=mark.colour, clip_on=False), autolim=False)
    elif isinstance(mark, Bar):
        box = Rectangle((mark.x, mark.y), mark.width, mark.height, facecolor=mark.colour, clip_on=False)
        box.set_edgecolor(mark.outline or "none")
        axes.add_artist(box)
    elif isinstance(mark, Dot):
        size = 2 * mark.radius * POINTS
        axes.plot(mark.x, mark.y, "o", color=mark.colour, markersize=size, markeredgewidth=0, clip_on=False)
    elif isinstance(mark, Text):
        look: dict[str, Any] = {"color": mark.colour, "fontweight": "bold" if mark.bold else "normal"}
        look |= {"ha": ANCHORS[mark.anchor], "va": "baseline", "fontsize": mark.size * POINTS, "parse_math": False}
        axes.text(mark.x, mark.y, mark.text, **look)
    else:
        cells = [[to_rgba(colour or "none") for colour in row] for row in mark.rows]
        extent = (mark.x, mark.x + mark.width, mark.y + mark.height, mark.y)
        axes.imshow(cells, aspect="auto", interpolation="nearest", extent=extent, clip_on=False)
        axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
