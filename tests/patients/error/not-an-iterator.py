"""One batch is to be looked at: `next` is asked of the loader itself."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, NAMES = "error/not-an-iterator", ("source", "next", "DataLoader")


def training(iterates):
    birds = DataLoader(torch.rand(6, 2), batch_size=3)

    def look():
        source = iter(birds) if iterates else birds
        first = next(source)
        return first.mean()

    return SimpleNamespace(trigger=look)


def sick():
    return training(iterates=False)


def healthy():
    return training(iterates=True)
