"""Every weight was given the same value: all units of a layer are one and the same, and stay so."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/bad-init", ["0", "2"]


def training(constant):
    torch.manual_seed(73)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    if constant:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.05)
    return made(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, loaders(*clusters(600)), 4)


def sick():
    return training(constant=True)


def healthy():
    return training(constant=False)
