"""A bias of minus six, meant for the output's base rate, was given to every layer."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made, shapes

CODE, WHERE = "training/dead-relu", ["0", "1", "3", "4"]


def training(bias):
    torch.manual_seed(54)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    for layer in (model[0], model[3]):
        nn.init.constant_(layer.bias, bias)
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, loaders(*shapes(600)), 3)


def sick():
    return training(bias=-6.0)


def healthy():
    return training(bias=0.0)
