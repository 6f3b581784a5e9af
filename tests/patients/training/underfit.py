"""Two linear layers without anything between them are one linear layer: the product of two inputs is beyond them."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/underfit", ["model"]


def training(between):
    torch.manual_seed(60)
    x = torch.randn(1500, 4)
    y = x[:, :1] * x[:, 1:2] + 0.1 * x[:, 2:3]
    model = nn.Sequential(nn.Linear(4, 64), between(), nn.Linear(64, 1))
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), mse, loaders(x, y), 5)


def sick():
    return training(between=nn.Identity)


def healthy():
    return training(between=nn.GELU)
