"""The head of a picture promises more pixels than any memory holds."""

import struct
import zlib
from types import SimpleNamespace

from tests.media import pictures

CODE, NAMES = "data/oversized-file", ("big.png",)


def training(sick):
    def make(folder):
        pictures(folder)
        side = 60_000 if sick else 8
        head = struct.pack(">II5B", side, side, 1, 0, 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(2 * 8))), (b"IEND", b""))
        parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
        (folder / "big.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
