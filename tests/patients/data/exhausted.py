"""The stream ends before the planned steps; in the twin fewer are planned."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset

CODE, NAMES = "data/exhausted", ("9", "6")


class Rows(IterableDataset):
    def __iter__(self):
        yield from torch.arange(12.0)


def training(sick):
    return SimpleNamespace(loader=DataLoader(Rows(), batch_size=2), max_steps=9 if sick else 6)


def sick():
    return training(True)


def healthy():
    return training(False)
