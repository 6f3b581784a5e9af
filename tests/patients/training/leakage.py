"""Rare cases were copied to balance the table, and only then was it split: copies stand on both sides."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/leakage", ["val_loader", "train_loader"]


def training(copied):
    torch.manual_seed(74)
    x, label = clusters(500, classes=3)
    if copied:
        rare = torch.arange(500)[label == 2]
        x, label = torch.cat([x, x[rare]]), torch.cat([label, label[rare]])
        order = torch.randperm(len(x))
        x, label = x[order], label[order]
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, loaders(x, label), 4)


def sick():
    return training(copied=True)


def healthy():
    return training(copied=False)
