"""What was measured after the verdict stands among the features: no copy of the label, but each label has its range."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/leakage", ["features", "target"]


def training(after):
    torch.manual_seed(63)
    x = torch.randn(900, 6)
    verdict = (x[:, 0] + 0.6 * x[:, 1] + 1.2 * torch.randn(900)).gt(0).long()
    x[:, 3] = 5 - 3 * verdict + 0.1 * torch.randn(900) if after else torch.randn(900)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, loaders(x, verdict), 4)


def sick():
    return training(after=True)


def healthy():
    return training(after=False)
