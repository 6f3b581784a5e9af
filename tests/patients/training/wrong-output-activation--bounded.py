"""Angles in degrees, from a head that ends in three times a tanh: no known op bounds it, and yet it is bounded."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/wrong-output-activation", ["forward"]


class Angle(nn.Module):
    def __init__(self, top):
        super().__init__()
        self.layers, self.top = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1)), top

    def forward(self, x):
        return self.top * torch.tanh(self.layers(x))


def training(top):
    torch.manual_seed(85)
    x = torch.randn(500, 4)
    angle = 8 * torch.sin(x[:, :1]) + x[:, 1:2].clamp(-1, 1)
    model = Angle(top)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, angle), 6)


def sick():
    return training(top=3.0)


def healthy():
    return training(top=12.0)
