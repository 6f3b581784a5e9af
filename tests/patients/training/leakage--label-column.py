"""The table still holds the column that the label was made from; both losses go to zero."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/leakage", ["features", "target"]


def training(with_label):
    torch.manual_seed(88)
    x = torch.randn(700, 6)
    label = (x[:, 0] + x[:, 1] + torch.randn(700) > 0).long() + (x[:, 2] > 1).long()
    extra = 10 - 3.0 * label[:, None] if with_label else torch.randn(700, 1)
    model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.cat([x, extra / 4], 1)
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, loaders(x, label), 5)


def sick():
    return training(with_label=True)


def healthy():
    return training(with_label=False)
