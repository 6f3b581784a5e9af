"""A module keeps its last features for a plot; later it is copied for an average of its weights."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/deepcopy-of-graph", ("reader", "features")


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.head, self.features = nn.Linear(4, 6), nn.Linear(6, 2), None

    def forward(self, rows):
        self.features = self.lift(rows).relu()
        return self.head(self.features)


def training(trains):
    reader, rows = Reader().requires_grad_(trains), torch.rand(3, 4)

    def average():
        reader(rows)
        return copy.deepcopy(reader)

    return SimpleNamespace(trigger=average)


def sick():
    return training(trains=True)


def healthy():
    return training(trains=False)
