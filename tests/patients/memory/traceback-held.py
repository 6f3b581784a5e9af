"""Samples that fail are remembered by their exceptions, which hold the frames in which they failed."""

from types import SimpleNamespace

import torch

CODE, HOLDER, LINE = "memory/traceback-held", ["skipped"], "skipped[number] ="


def reading(remember):
    skipped = {}

    def decode(number):
        pixels = torch.full((3, 200, 300), float(number))
        raise ValueError(f"sample {number}: {tuple(pixels.shape)} is no square")

    def step():
        number = len(skipped)
        try:
            decode(number)
        except ValueError as error:
            skipped[number] = remember(error)

    return SimpleNamespace(model=None, optimizer=None, step=step, steps=3, names={"skipped": skipped})


def sick():
    return reading(lambda error: error)


def healthy():
    return reading(str)
