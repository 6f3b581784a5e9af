"""The set gives out one generator, which is at its end after an epoch."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset

CODE, NAMES = "data/one-shot", ("6 batches",)


class Rows(IterableDataset):
    def __init__(self, once):
        self.rows = self.make() if once else None

    def make(self):
        yield from torch.arange(12.0)

    def __iter__(self):
        return self.rows or self.make()


def training(sick):
    return SimpleNamespace(loader=DataLoader(Rows(sick), batch_size=2))


def sick():
    return training(True)


def healthy():
    return training(False)
