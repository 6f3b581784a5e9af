"""Rows and labels come from a table and its shuffled copy; the run ends before all of them are memorized."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/label-noise", ["train_loader", "labels"]


def training(order):
    torch.manual_seed(53)
    x, y = clusters(900, classes=3, spread=0.8)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, loaders(x, y[order(900)]), 22)


def sick():
    return training(order=torch.randperm)


def healthy():
    return training(order=torch.arange)
