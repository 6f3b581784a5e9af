"""All pairs of points are compared in one layer: with 900 points its activations dwarf the network."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/activations-dominate", ["pairs"], "(x[:, None] - x[None]).tanh()"


class Pairs(nn.Module):
    def forward(self, x):
        return (x[:, None] - x[None]).tanh().mean(1)


def training(points):
    torch.manual_seed(4)
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(3, 12))
    model.add_module("pairs", Pairs())
    model.add_module("head", nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    cloud = torch.randn(points, 3)

    def step():
        optimizer.zero_grad()
        model(cloud).square().mean().backward()
        optimizer.step()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2, names={})


def sick():
    return training(900)


def healthy():
    return training(30)
