"""A gallery: small pictures of a data set, with their names. HTML shows them as JPEG, a figure as few colours."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from typing import Any

from nbdebug.text import clip_start, count
from nbdebug.views.plots.marks import INK, WIDTH, Drawing, Mark, Pixels, Text
from nbdebug.views.wording import clean

ACROSS, SIDE, ROW = 6, 96, 136
"""Pictures in a row, their longer side, and the height of a row with its two lines of text."""


@dataclasses.dataclass(frozen=True)
class Gallery:
    """pictures: each with name, label (a code, or ""), jpeg (base64), size (width, height), rows (of colours)."""

    title: str
    pictures: tuple[Mapping[str, Any], ...]

    def sentence(self) -> str:
        names = ", ".join(clip_start(clean(p["name"], 60), 40) for p in self.pictures[:6])
        more = " …" if len(self.pictures) > 6 else ""
        return f"{clean(self.title, 100)}: {count(len(self.pictures), 'picture')} ({names}{more})."

    def html(self) -> str:
        """The pictures side by side, each with its name below."""
        drawn = "".join(_figure(picture) for picture in self.pictures)
        head = f'<p style="margin:.3em 0;font-weight:600">{html.escape(clean(self.title, 100))}</p>'
        return f'{head}<div style="overflow-x:auto">{drawn}</div>'

    def drawing(self) -> Drawing:
        marks: list[Mark] = []
        step = WIDTH / ACROSS
        for place, picture in enumerate(self.pictures):
            x, y = place % ACROSS * step, place // ACROSS * ROW
            wide, tall = (side * 0.9 for side in picture["size"])
            marks.append(Pixels(x, y, wide, tall, picture["rows"]))
            for line, text in enumerate((picture["name"], picture["label"])):
                marks.append(Text(x, y + SIDE + 14 * (line + 1), clean(text, 60)[-15:], colour=INK, size=9))
        return Drawing(marks, ROW * ((len(self.pictures) + ACROSS - 1) // ACROSS) + 8)


def _figure(picture: Mapping[str, Any]) -> str:
    wide, tall = picture["size"]
    name, label = html.escape(clean(picture["name"], 200)), html.escape(clean(picture["label"], 60))
    text = "font-size:.75em;max-width:100px;overflow-wrap:anywhere;line-height:1.25"
    return (
        '<div style="display:inline-block;vertical-align:top;width:104px;margin:0 6px 8px 0">'
        f'<img src="data:image/jpeg;base64,{picture["jpeg"]}" width="{wide}" height="{tall}" '
        f'alt="{name}: {label or "a sample"}">'
        f'<div style="{text}">{name}</div><div style="{text};opacity:.72">{label}</div></div>'
    )


def read(data: Mapping[str, Any]) -> Gallery | None:
    """None where there is no picture."""
    pictures = tuple(data.get("pictures", ()))
    return Gallery(str(data.get("title", "")), pictures) if pictures else None
