"""Prices of some thousands: with Adam's usual rate the output needs hours to come up to them."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/lr-too-low", ["lr"]


def training(mean, deviation):
    torch.manual_seed(55)
    x = torch.randn(600, 5)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    pair = loaders(x, mean + deviation * x.sum(1, keepdim=True) / 5**0.5)
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), mse, pair, 8)


def sick():
    return training(mean=3000.0, deviation=400.0)


def healthy():
    return training(mean=0.0, deviation=1.0)
