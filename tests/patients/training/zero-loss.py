"""A binary classifier with one output is given cross entropy: a softmax over one class is always one."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/zero-loss", ["loss_fn"]


def training(outputs):
    torch.manual_seed(53)
    x, y = clusters(600, classes=2)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, outputs))
    return made(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        cross_entropy,
        loaders(x, y if outputs == 2 else torch.zeros_like(y)),
        5,
    )


def sick():
    return training(outputs=1)


def healthy():
    return training(outputs=2)
