"""The annotators count the classes from one; the last of them has no output."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/label-out-of-range", ["train_loader", "cross_entropy"]


def training(first):
    torch.manual_seed(68)
    x, label = clusters(600, classes=4)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(x, label + first), 4)


def sick():
    return training(first=1)


def healthy():
    return training(first=0)
