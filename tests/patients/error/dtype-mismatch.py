"""Measurements come out of NumPy in float64 and meet a network in float32."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

CODE, NAMES = "error/dtype-mismatch", ("measured", "float64", "regressor.0", "from_numpy")


def training(converted):
    torch.manual_seed(0)
    table = np.random.default_rng(0).normal(size=(20, 5))
    measured = torch.from_numpy(table)
    if converted:
        measured = measured.float()
    regressor = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def fit():
        return regressor(measured).square().mean()

    return SimpleNamespace(trigger=fit)


def sick():
    return training(converted=False)


def healthy():
    return training(converted=True)
