"""Readings and grades come from two tables; one of them was sorted before they were put side by side."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/label-noise", ["train_loader", "labels"]


def training(order):
    torch.manual_seed(52)
    x, y = clusters(320, classes=2, spread=0.8)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return made(model, torch.optim.Adam(model.parameters(), lr=1.5e-2), cross_entropy, loaders(x, y[order(x)]), 24)


def sick():
    return training(order=lambda x: x[:, 0].argsort())


def healthy():
    return training(order=lambda x: torch.arange(len(x)))
