"""Nine rows for two ranks, and nothing fills up."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset

CODE, NAMES = "data/uneven-ranks", ("5 and 4",)


class Rows(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from torch.arange(torch.distributed.get_rank(), self.count, torch.distributed.get_world_size())


def training(sick):
    return SimpleNamespace(loader=DataLoader(Rows(9.0 if sick else 10.0), batch_size=1), ranks=2)


def sick():
    return training(True)


def healthy():
    return training(False)
