"""A copy stopped on its way: the picture opens, and its pixels end early."""

import pathlib
import tempfile
from types import SimpleNamespace

import numpy as np
from PIL import Image

CODE, NAMES = "data/truncated-image", ("moth.jpg", "end early")


def training(share):
    path = pathlib.Path(tempfile.mkdtemp()) / "moth.jpg"
    pixels = np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    return SimpleNamespace(trigger=lambda: Image.open(path).convert("RGB"))


def sick():
    return training(0.6)


def healthy():
    return training(1)
