"""The hour of a day is read from the light and the shadow, and learned as a number from 0 to 24."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/target-wraps", ["loss_fn"]


def training(turns):
    torch.manual_seed(64)
    hour = 24 * torch.rand(900, 1)
    turn = hour * math.pi / 12
    x = torch.cat([turn.sin(), turn.cos(), turn.sin() * turn.cos()], 1) + 0.1 * torch.randn(900, 3)
    x = torch.cat([x, torch.randn(900, 3)], 1)
    model = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 2 if turns else 1))

    def loss_fn(model, batch):
        if turns:
            turn = batch[1] * math.pi / 12
            return F.mse_loss(model(batch[0]), torch.cat([turn.sin(), turn.cos()], 1))
        return F.mse_loss(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, loaders(x, hour), 10)


def sick():
    return training(turns=False)


def healthy():
    return training(turns=True)
