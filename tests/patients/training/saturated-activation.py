"""Hidden values are turned into per cent half-way: every tanh behind the next layer is at one of its ends."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/saturated-activation", ["second", "third"]


class Angles(nn.Module):
    def __init__(self, unit):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.out, self.unit = nn.Linear(48, 1), unit

    def forward(self, angles):
        hidden = torch.tanh(self.second(torch.tanh(self.first(angles)) * self.unit))
        return self.out(torch.tanh(self.third(hidden * self.unit)))


def training(unit):
    torch.manual_seed(55)
    x = (torch.rand(1200, 2) * 2 - 1) * 3.14
    y = torch.sin(x[:, :1]) * torch.cos(x[:, 1:])
    model = Angles(unit)
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), mse, loaders(x, y), 5)


def sick():
    return training(unit=100.0)


def healthy():
    return training(unit=1.0)
