"""A row of the set is NaN, and the loader shuffles; the item is named."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, TensorDataset

CODE, NAMES = "data/nonfinite-values", ("item 9",)


def training(sick):
    x = torch.ones(12, 3)
    x[9, 1] = float("nan") if sick else 2.0
    return SimpleNamespace(loader=DataLoader(TensorDataset(x, torch.zeros(12)), batch_size=4, shuffle=True))


def sick():
    return training(True)


def healthy():
    return training(False)
