"""A price stands among the features a second time, in another currency and rounded."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/leakage", ["features", "target"]


def training(twice):
    torch.manual_seed(62)
    x = torch.randn(900, 6)
    price = x[:, 0] * x[:, 1] + x[:, 2].sin() + 0.5 * torch.randn(900)
    x[:, 4] = (1.1 * price + 2 + 0.02 * torch.randn(900)) if twice else torch.randn(900)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), mse, loaders(x, price[:, None]), 4)


def sick():
    return training(twice=True)


def healthy():
    return training(twice=False)
