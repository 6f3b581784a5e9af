"""One picture of the set has another shape."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, NAMES = "data/batch-fails", ("batch 2",)


def training(sick):
    pictures = [torch.zeros(3, 4, 4) for _ in range(10)]
    pictures[5] = torch.zeros(1 if sick else 3, 4, 4)
    return SimpleNamespace(loader=DataLoader(pictures, batch_size=2))


def sick():
    return training(True)


def healthy():
    return training(False)
