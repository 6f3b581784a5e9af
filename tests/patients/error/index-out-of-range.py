"""A label file counts its kinds from 1; the loss counts from 0, and the last kind is one too many."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/index-out-of-range", ("kinds", "scorer.2", "3 classes", "kinds - 1")


def training(from_zero):
    torch.manual_seed(0)
    scorer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    kinds = torch.tensor([1, 2, 1, 3, 2]) - int(from_zero)
    rows = torch.rand(5, 4)

    def fit():
        return nn.functional.cross_entropy(scorer(rows), kinds)

    return SimpleNamespace(trigger=fit)


def sick():
    return training(from_zero=False)


def healthy():
    return training(from_zero=True)
