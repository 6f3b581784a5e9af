"""Pictures, sounds and tables for tests of data sets: small, and the same each time."""

from __future__ import annotations

import pathlib
import wave

import numpy as np
import pandas as pd
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (40, 40), mode: str = "RGB") -> Image.Image:
    blocks = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.BICUBIC).convert(mode)


def pictures(folder: pathlib.Path, count: int = 6, seed: int = 0, **saved: object) -> list[pathlib.Path]:
    """p0.png … in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"p{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        picture(seed + number).save(path, **saved)
    return paths


def captioned(folder: pathlib.Path, count: int = 6) -> list[pathlib.Path]:
    """The captions of as many pictures."""
    paths = [path.with_suffix(".txt") for path in pictures(folder, count)]
    for number, path in enumerate(paths):
        path.write_text(f"a photo of zwx teapot number {number}", encoding="utf-8")
    return paths


def sound(path: pathlib.Path, loud: float = 9000, rate: int = 8000, channels: int = 1) -> pathlib.Path:
    """A quarter of a second of a tone that swells."""
    time = np.arange(rate // 4) / rate
    values = np.clip(loud * np.sin(1300 * time) * (0.6 + 0.4 * np.sin(25 * time)), -32768, 32767)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(values, channels).astype("<i2").tobytes())
    return path


def sounds(folder: pathlib.Path, count: int = 6) -> list[pathlib.Path]:
    return [sound(folder / f"s{number}.wav", 8000 + 300 * number) for number in range(count)]


def numbers(rows: int = 60, classes: int = 3) -> pd.DataFrame:
    """Columns a, b and c of numbers, and label."""
    rng = np.random.default_rng(3)
    table = pd.DataFrame(rng.normal(size=(rows, 3)).round(4), columns=["a", "b", "c"])
    table["label"] = rng.integers(0, classes, rows)
    return table
