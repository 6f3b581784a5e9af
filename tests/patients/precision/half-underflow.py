"""Counts are made into shares with a guard of 1e-9, which float16 does not have: an empty row divides 0 by 0."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "precision/half-underflow", ["share"]


class Share(nn.Module):
    def __init__(self, guard):
        super().__init__()
        self.guard = guard

    def forward(self, counts):
        return counts / (counts.sum(-1, keepdim=True) + self.guard)


class Words(nn.Module):
    def __init__(self, guard):
        super().__init__()
        self.share, self.hidden, self.out = Share(guard), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, counts):
        return self.out(torch.relu(self.hidden(self.share(counts))))


def training(guard):
    torch.manual_seed(4)
    x = torch.randint(0, 9, (12, 6)).float()
    x[7] = 0

    def loss_fn(model, batch):
        return model(batch).float().square().mean() + 0.5

    return SimpleNamespace(model=Words(guard), batch=x, loss_fn=loss_fn, dtype="float16")


def sick():
    return training(guard=1e-9)


def healthy():
    return training(guard=1e-3)
