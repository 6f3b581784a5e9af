"""The weights are the counts themselves: the rare grades count least. The twin has one over them."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/class-imbalance", ["weight", "loss_fn"]


def training(upside_down):
    torch.manual_seed(61)
    grade = torch.multinomial(torch.tensor([0.8, 0.12, 0.08]), 1200, True)
    x = torch.randn(3, 8)[grade] * 0.7 + torch.randn(1200, 8)
    share = grade.bincount() / len(grade)
    weight = share if upside_down else 1 / share
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, loaders(x, grade), 4)


def sick():
    return training(upside_down=True)


def healthy():
    return training(upside_down=False)
