"""Marks: what every picture is made of, and how they are written as SVG. `figure.py` draws the same with matplotlib.

A picture is described once, as a Drawing: marks in pixels from its upper left corner. It must be legible on white
and on #212121 and cannot ask which it is on, so its ground is transparent and its colours are midway.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

WIDTH = 640
VALUES, SECOND, FAULT, INK = "#4d86c2", "#b97a3c", "#d4564c", "#808080"
"""Of the curves, of what is at fault, of text and axes; each has a contrast of at least 3.4 to white and to #212121."""
FAINT, RULE = "#80808066", "#80808033"
SIZE = 11.5
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"

Place: TypeAlias = tuple[float, float]
Path: TypeAlias = Sequence[Place]


@dataclasses.dataclass(frozen=True)
class Lines:
    """Paths of one look, each through its places."""

    paths: Sequence[Path]
    colour: str = INK
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Areas:
    """Filled polygons."""

    paths: Sequence[Path]
    colour: str = INK


@dataclasses.dataclass(frozen=True)
class Bar:
    """A rectangle. outline: colour of its border, or ""."""

    x: float
    y: float
    width: float
    height: float
    colour: str = VALUES
    outline: str = ""


@dataclasses.dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    colour: str = VALUES


@dataclasses.dataclass(frozen=True)
class Text:
    """y: of the baseline. anchor: which part of it is at x: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = INK
    bold: bool = False
    size: float = SIZE


@dataclasses.dataclass(frozen=True)
class Pixels:
    """A rectangle of colours, a row each: "#rrggbb", "#rrggbbaa", or None for nothing."""

    x: float
    y: float
    width: float
    height: float
    rows: Sequence[Sequence[str | None]]


Mark: TypeAlias = Lines | Areas | Bar | Dot | Text | Pixels


@dataclasses.dataclass(frozen=True)
class Drawing:
    marks: Sequence[Mark]
    height: float
    width: float = WIDTH


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, dash: tuple[float, ...] = ()) -> Lines:
    """One straight line."""
    return Lines((((x1, y1), (x2, y2)),), colour, dash=dash)


def curve(places: Path, colour: str = VALUES, dash: tuple[float, ...] = ()) -> Mark:
    """A curve through these places; a dot where there is only one."""
    return Dot(*places[0], 2.5, colour) if len(places) == 1 else Lines((places,), colour, 1.3, dash)


# -- as SVG -----------------------------------------------------------------------------------------------------------


def image(drawing: Drawing, alt: str) -> str:
    """`<img src="data:image/svg+xml;base64,…" alt="…">`. alt: the picture in words, for those who do not see it."""
    data = base64.b64encode(svg(drawing).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(alt)}" width="{_n(drawing.width)}" '
        'style="max-width:100%;height:auto;display:block;background:none;border:0;margin:0">'
    )


def svg(drawing: Drawing) -> str:
    wide, tall = _n(drawing.width), _n(drawing.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" '
        f'font-family="{FONTS}" font-size="{SIZE}">{"".join(map(_element, drawing.marks))}</svg>'
    )


def _element(mark: Mark) -> str:
    if isinstance(mark, Lines):
        dash = f' stroke-dasharray="{" ".join(map(_n, mark.dash))}"' if mark.dash else ""
        width = f' stroke-width="{_n(mark.width)}" stroke-linejoin="round"' if mark.width != 1 else ""
        return f'<path d="{_d(mark.paths)}" stroke="{mark.colour}" fill="none"{width}{dash}/>'
    if isinstance(mark, Areas):
        return f'<path d="{_d(mark.paths, "z")}" fill="{mark.colour}"/>'
    if isinstance(mark, Bar):
        outline = f' stroke="{mark.outline}"' if mark.outline else ""
        box = f'x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}"'
        return f'<rect {box} fill="{mark.colour}"{outline}/>'
    if isinstance(mark, Dot):
        return f'<circle cx="{_n(mark.x)}" cy="{_n(mark.y)}" r="{_n(mark.radius)}" fill="{mark.colour}"/>'
    if isinstance(mark, Text):
        look = f' text-anchor="{mark.anchor}"' * (mark.anchor != "start") + ' font-weight="600"' * mark.bold
        look += f' font-size="{mark.size:g}"' * (mark.size != SIZE)
        return f'<text x="{_n(mark.x)}" y="{_n(mark.y)}" fill="{mark.colour}"{look}>{html.escape(mark.text)}</text>'
    return (
        f'<image x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{base64.b64encode(png(mark.rows)).decode()}"/>'
    )


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _d(paths: Iterable[Path], end: str = "") -> str:
    return "".join("M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in path) + end for path in paths)


def png(rows: Sequence[Sequence[str | None]]) -> bytes:
    """One pixel for each colour; rows are equally long. Raises ValueError when there is no pixel."""
    if not rows or not rows[0]:
        raise ValueError("a picture has at least one pixel")
    colours = list(dict.fromkeys(c for row in rows for c in row))[:256]
    index = {colour: place for place, colour in enumerate(colours)}
    parts = [bytes.fromhex((c or "#00000000").lstrip("#").ljust(8, "f")) for c in colours]
    lines = b"".join(b"\0" + bytes(index.get(c, 0) for c in row) for row in rows)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(p[:3] for p in parts)),
        (b"tRNS", b"".join(p[3:] for p in parts)),
        (b"IDAT", zlib.compress(lines, 6)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
