"""A small picture made of squares, as a PNG: what an SVG would need thousands of rectangles for."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence


def png(rows: Sequence[Sequence[str | None]]) -> bytes:
    """One pixel for each colour ("#rrggbb", "#rrggbbaa"; None is transparent), a row each; rows are equally long.

    Raises ValueError when there is no pixel."""
    if not rows or not rows[0]:
        raise ValueError("a picture has at least one pixel")
    colours = list(dict.fromkeys(c for row in rows for c in row))[:256]
    index = {colour: place for place, colour in enumerate(colours)}
    parts = [_parts(colour) for colour in colours]
    lines = b"".join(b"\0" + bytes(index.get(c, 0) for c in row) for row in rows)
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + _chunk(b"PLTE", b"".join(p[:3] for p in parts))
        + _chunk(b"tRNS", b"".join(p[3:] for p in parts))
        + _chunk(b"IDAT", zlib.compress(lines, 6))
        + _chunk(b"IEND", b"")
    )


def address(rows: Sequence[Sequence[str | None]]) -> str:
    """The same as a data: address."""
    return "data:image/png;base64," + base64.b64encode(png(rows)).decode()


def _parts(colour: str | None) -> bytes:
    if colour is None:
        return bytes(4)
    digits = colour.lstrip("#")
    return bytes.fromhex(digits if len(digits) == 8 else digits + "ff")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
