"""Dropout behind the last layer: half of the outputs are zero when the loss compares them."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/over-regularized", ["dropout"]


def training(last):
    torch.manual_seed(109)
    x = torch.randn(900, 6)
    y = x[:, :1] * 2 + x[:, 1:2].abs() + 3
    ends = [nn.Linear(64, 1), nn.Dropout(0.5)] if last else [nn.Dropout(0.1), nn.Linear(64, 1)]
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), *ends)
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), mse, loaders(x, y), 10)


def sick():
    return training(last=True)


def healthy():
    return training(last=False)
