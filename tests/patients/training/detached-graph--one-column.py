"""Attention over time whose softmax runs over the one column of the scores: all weights are 1 and stay it."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE, RUN = "training/detached-graph", ["score.weight", "forward"], True


class Pooled(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner, self.score, self.head, self.dim = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 3), dim

    def forward(self, x):
        h = self.inner(x).tanh()
        return self.head((self.score(h).softmax(self.dim) * h).sum(1))


def training(dim):
    torch.manual_seed(64)
    x = torch.randn(600, 5, 6)
    y = x.square().sum(2).argmax(1) % 3
    model = Pooled(dim)
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(x, y), 4)


def sick():
    return training(dim=2)


def healthy():
    return training(dim=1)
