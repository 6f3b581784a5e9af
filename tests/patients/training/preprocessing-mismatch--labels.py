"""The classes of the validation set are numbered by another file's order of names."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/preprocessing-mismatch", ["val_loader"], True


def training(numbers):
    torch.manual_seed(53)
    x, y = clusters(700, classes=4)
    y[560:] = torch.tensor(numbers)[y[560:]]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(x, y), 8)


def sick():
    return training(numbers=[2, 3, 1, 0])


def healthy():
    return training(numbers=[0, 1, 2, 3])
