"""A table with incomes in it goes into the network as it is; the twin standardises its columns."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/input-not-normalized", ["train_loader"]


def training(scaled):
    torch.manual_seed(70)
    table = torch.stack([torch.rand(900) * 60 + 20, torch.randn(900) * 14000 + 42000, torch.rand(900)], 1)
    label = (table[:, 0] / 60 + table[:, 2] > 1.3).long()
    if scaled:
        table = (table - table.mean(0)) / table.std(0)
    model = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 2))
    return made(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, loaders(table, label), 6)


def sick():
    return training(scaled=False)


def healthy():
    return training(scaled=True)
