"""A data set that lies class by class is cut into training and validation as it lies."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/preprocessing-mismatch", ["val_loader", "labels"]


def training(dealt):
    torch.manual_seed(115)
    x, y = clusters(1200, classes=6)
    order = torch.randperm(1200) if dealt else y.argsort(stable=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))
    pair = loaders(x[order], y[order])
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, pair, 6)


def sick():
    return training(dealt=False)


def healthy():
    return training(dealt=True)
