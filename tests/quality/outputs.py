"""Sets of pictures and texts as models make them: healthy ones of many kinds, and changed copies."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

Picture = Any


def smooth(rng: Any, cells: int, low: int = 0, high: int = 255, side: int = 32) -> Picture:
    small = Image.fromarray(rng.integers(low, high, (cells, cells, 3), dtype=np.uint8))
    return np.asarray(small.resize((side, side), Image.BICUBIC), dtype=float)


def scene(rng: Any, tint: Any = (1, 1, 1)) -> Picture:
    return smooth(rng, 6) * tint


def face(rng: Any) -> Picture:
    """What all have in common is most of it."""
    return 0.8 * smooth(np.random.default_rng(0), 5) + 0.2 * smooth(rng, 8)


def texture(rng: Any) -> Picture:
    return 128 + rng.normal(0, 30, (32, 32, 3))


def digit(rng: Any) -> Picture:
    picture = np.zeros((32, 32, 3))
    x, y = rng.integers(8, 16, 2)
    picture[y : y + rng.integers(6, 14), x : x + rng.integers(3, 14)] = 230
    return picture


def wall(rng: Any) -> Picture:
    """One composition in any colour."""
    return smooth(np.random.default_rng(1), 4, 90, 255) * rng.uniform(0.5, 1, 3)


def grey(rng: Any) -> Picture:
    return np.repeat(smooth(rng, 7)[..., :1], 3, 2)


def whole(pictures: list[Picture]) -> Any:
    return np.clip(np.round(np.stack(pictures)), 0, 255).astype(np.uint8)


KINDS: tuple[Callable[[Any], Picture], ...] = (
    scene,
    face,
    texture,
    digit,
    wall,
    grey,
    lambda rng: scene(rng, (1, 0.75, 0.5)),  # a tinted set, and tinted samples
)


def healthy_pictures() -> Iterator[tuple[Any, Any]]:
    """(generated, training) of 21 sets, a third of them with few samples."""
    for number, kind in enumerate(KINDS):
        for few in (5, 12, 24):
            rng = np.random.default_rng(100 * number + few)
            yield whole([kind(rng) for _ in range(few)]), whole([kind(rng) for _ in range(60)])


WORDS = (
    "river stone light quiet morning window paper green walk under seven garden slowly market glass winter talk "
    "round letter yellow bread harbour wooden evening cloud simple road careful number table distant music"
).split()


def sentence(rng: random.Random, most: int = 14) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, most))).capitalize() + "."


def sums(rng: random.Random) -> str:
    return f"What is {rng.randint(100, 99999)} plus {rng.randint(100, 99999)}? Write the steps of it down, please."


def healthy_texts() -> Iterator[tuple[list[str], list[str]]]:
    """(generated, training) of 9 sets."""
    replies = ["Yes.", "No, thank you.", "Of course.", "I don't know.", "At five o'clock.", "See you later!"]
    makers: tuple[Callable[[random.Random], str], ...] = (
        sentence,
        sums,
        lambda rng: rng.choice(replies),
        lambda rng: " ".join(sentence(rng) for _ in range(rng.randint(2, 6))),
        lambda rng: f"def {rng.choice(WORDS)}_{rng.randint(0, 999)}(a, b):\n    return a + {rng.randint(0, 9999)} * b",
        lambda rng: f"{sentence(rng)} La la la, la la la. {sentence(rng)} La la la, la la la!",
        lambda rng: f"Dear customer, thank you very much for your kind letter. {sentence(rng)} {sentence(rng)}",
        lambda rng: "\n".join(f"- {sentence(rng, 6)}" for _ in range(rng.randint(2, 8))),
        lambda rng: f"{sentence(rng)} Ha ha ha ha ha!!!!!!!!!!",
    )
    for number, make in enumerate(makers):
        rng = random.Random(number)
        yield [make(rng) for _ in range(16)], [make(rng) for _ in range(120)]


def jpeg(picture: Any) -> Any:
    data = io.BytesIO()
    Image.fromarray(picture).save(data, "JPEG", quality=40)
    return np.asarray(Image.open(data).convert("RGB"))


def resized(picture: Any) -> Any:
    small = Image.fromarray(picture).resize((20, 20), Image.BICUBIC)
    return np.asarray(small.resize((32, 32), Image.BICUBIC))


def noisy(picture: Any) -> Any:
    return np.clip(picture + np.random.default_rng(3).normal(0, 8, picture.shape), 0, 255).astype(np.uint8)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda picture: picture,
    "flipped": lambda picture: picture[:, ::-1],
    "moved": lambda picture: np.roll(picture, 1, 1),
    "encoded": jpeg,
    "noisy": noisy,
    "brighter": lambda picture: np.clip(picture * 1.1, 0, 255).astype(np.uint8),
    "resized": resized,
}


RATE = 8000


def speech(rng: Any) -> Any:
    """A second of a voice: harmonics of a pitch that drifts, in syllables."""
    pitch = rng.uniform(90, 250) * np.exp(np.cumsum(rng.normal(0, 0.0005, RATE)))
    phase = np.cumsum(2 * np.pi * pitch / RATE)
    loudness = np.repeat(np.abs(np.convolve(rng.normal(size=40), np.ones(3) / 3, "same")), RATE // 40)
    return 0.2 * sum(np.sin(k * phase) / k for k in range(1, 9)) * loudness + 0.003 * rng.normal(size=RATE)


def chimes(rng: Any) -> Any:
    sound = np.zeros(RATE)
    for _ in range(4):
        start = rng.integers(0, RATE - 1500)
        wave = np.sin(2 * np.pi * rng.uniform(100, 1500) * np.arange(1500) / RATE)
        sound[start : start + 1500] += 0.2 * wave * np.hanning(1500)
    return sound


def squares(rng: Any) -> Any:
    """Full scale by nature."""
    notes = rng.choice([220, 262, 330, 392, 440, 523], 8)
    return np.concatenate([np.sign(np.sin(2 * np.pi * note * np.arange(1000) / RATE)) for note in notes])
