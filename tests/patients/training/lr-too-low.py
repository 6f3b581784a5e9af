"""AdamW with a rate of a ten-millionth, as it is left behind by a sweep: nothing moves."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/lr-too-low", ["lr"]


def training(lr):
    torch.manual_seed(41)
    x = torch.randn(800, 6)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2]
    model = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 1))
    return made(model, torch.optim.AdamW(model.parameters(), lr=lr), mse, loaders(x, y), 5)


def sick():
    return training(lr=1e-7)


def healthy():
    return training(lr=3e-3)
