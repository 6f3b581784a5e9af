"""Batch normalization with the momentum of another library: its running statistics stay those of the start."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/running-statistics", ["momentum", "BatchNorm"], True


def training(momentum):
    torch.manual_seed(72)
    x, y = clusters(500, classes=4)
    model = nn.Sequential(
        nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32, momentum=momentum), nn.ReLU(), nn.Linear(32, 4)
    )
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(4 * x + 9, y), 8)


def sick():
    return training(momentum=1e-4)


def healthy():
    return training(momentum=0.1)
