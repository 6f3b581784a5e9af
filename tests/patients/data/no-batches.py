"""The set is smaller than a batch, and the last batch is dropped."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, NAMES = "data/no-batches", ("drop_last",)


def training(sick):
    return SimpleNamespace(loader=DataLoader(torch.zeros(5, 2), batch_size=8, drop_last=sick))


def sick():
    return training(True)


def healthy():
    return training(False)
