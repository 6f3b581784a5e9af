"""A momentum in the sense of another library: running statistics are those of the last batch."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/running-statistics", ["momentum", "BatchNorm"], True


def training(momentum):
    torch.manual_seed(97)
    layers = [nn.Linear(12, 24), nn.BatchNorm1d(24, momentum=momentum), nn.ReLU(), nn.Linear(24, 24)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(24, momentum=momentum), nn.ReLU(), nn.Linear(24, 4))
    pair = loaders(*clusters(300, classes=4), batch=4)
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, pair, 5)


def sick():
    return training(momentum=0.99)


def healthy():
    return training(momentum=0.01)
