"""Forty in a hundred training labels are drawn at random, and a network that is large enough memorizes them all."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/label-noise", ["train_loader", "labels"]


def training(careless):
    torch.manual_seed(51)
    x, y = clusters(600)
    drawn = torch.rand(600) < careless
    drawn[480:] = False
    model = nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 5))
    pair = loaders(x, torch.where(drawn, torch.randint(0, 5, (600,)), y))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, pair, 16)


def sick():
    return training(careless=0.4)


def healthy():
    return training(careless=0.0)
