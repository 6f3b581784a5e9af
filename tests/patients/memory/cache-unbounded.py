"""Spectrograms are cached by the place at which a clip was cut out, which hardly ever comes again."""

from functools import lru_cache
from types import SimpleNamespace

import torch

CODE, HOLDER, LINE = "memory/cache-unbounded", ["spectrogram"], "def spectrogram(start)"


def loading(size):
    generator = torch.Generator().manual_seed(4)

    @lru_cache(maxsize=size)
    def spectrogram(start):
        return torch.arange(start, start + 128 * 128.0).view(128, 128).log1p()

    def step():
        starts = torch.randint(0, 10**6, (8,), generator=generator).tolist()
        return torch.stack([spectrogram(start) for start in starts]).mean()

    return SimpleNamespace(model=None, optimizer=None, step=step, steps=3, names={"spectrogram": spectrogram})


def sick():
    return loading(None)


def healthy():
    return loading(4)
