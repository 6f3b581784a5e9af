"""Both ranks read the whole stream."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset

CODE, NAMES = "data/not-sharded", ("ranks",)


class Rows(IterableDataset):
    def __init__(self, whole):
        self.whole = whole

    def __iter__(self):
        distributed = torch.distributed
        first, step = (0, 1) if self.whole else (distributed.get_rank(), distributed.get_world_size())
        yield from torch.arange(first, 12.0, step)


def training(sick):
    return SimpleNamespace(loader=DataLoader(Rows(sick), batch_size=2), ranks=2)


def sick():
    return training(True)


def healthy():
    return training(False)
