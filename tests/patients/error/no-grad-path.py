"""A penalty is added up as Python numbers: the loss is a tensor again, and nothing leads back to the net."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/no-grad-path", ("penalty", "item", "gap")


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points):
        return self.body(points).squeeze(-1)


def penalty_in_numbers(net, points):
    gap = (net(points) - points.sum(1)).abs().mean()
    penalty = 3 * gap.item()
    return torch.tensor(penalty)


def penalty_in_tensors(net, points):
    gap = (net(points) - points.sum(1)).abs().mean()
    return 3 * gap


def training(objective):
    torch.manual_seed(0)
    net, points = Curve().eval(), torch.rand(6, 2)

    def trigger():
        loss = objective(net, points)
        loss.backward()

    return SimpleNamespace(trigger=trigger)


def sick():
    return training(penalty_in_numbers)


def healthy():
    return training(penalty_in_tensors)
