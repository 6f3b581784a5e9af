"""The rows that are skipped to resume are skipped in the next pass, too."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset

CODE, NAMES = "data/skip-kept", ("skip_samples", "4 rows")


class Rows(IterableDataset):
    def __init__(self, stays):
        self.skip_samples, self.stays = 0, stays

    def __iter__(self):
        skip = self.skip_samples
        self.skip_samples = skip if self.stays else 0
        yield from torch.arange(skip, 12.0)


def training(sick):
    return SimpleNamespace(loader=DataLoader(Rows(sick), batch_size=2), resume_at=2)


def sick():
    return training(True)


def healthy():
    return training(False)
