"""A learned prompt is a tensor that requires a gradient, and no nn.Parameter: the optimizer never gets it."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/parameters-not-in-optimizer", ["offset"], True


class Shifted(nn.Module):
    def __init__(self, learned):
        super().__init__()
        start = torch.randn(12)
        self.offset = nn.Parameter(start) if learned else start.requires_grad_()
        self.body = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5))

    def forward(self, x):
        return self.body(x + self.offset)


def training(learned):
    torch.manual_seed(62)
    model = Shifted(learned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return made(model, optimizer, cross_entropy, loaders(*clusters(600)), 4)


def sick():
    return training(learned=False)


def healthy():
    return training(learned=True)
