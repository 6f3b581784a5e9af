"""skip_samples is set, and the persistent workers hold the set from before."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset

CODE, NAMES = "data/stale-worker-copy", ("skip_samples",)


class Rows(IterableDataset):
    def __init__(self):
        self.skip_samples = 0

    def __iter__(self):
        skip, self.skip_samples = self.skip_samples, 0
        yield from torch.arange(skip, 12.0)


def training(sick):
    workers = {"num_workers": 1, "persistent_workers": True} if sick else {}
    return SimpleNamespace(loader=DataLoader(Rows(), batch_size=2, **workers), resume_at=2)


def sick():
    return training(True)


def healthy():
    return training(False)
