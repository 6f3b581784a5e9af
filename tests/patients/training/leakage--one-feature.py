"""What follows from the verdict stands among the features, blurred: it alone tells the labels. In the twin the feature
is as strong, and two others are related to it (a correlation of 0.8): it was measured, as they were."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/leakage", ["features", "target"]


def training(related):
    torch.manual_seed(64)
    x = torch.randn(900, 6)
    verdict = (x[:, 0] + 0.6 * x[:, 1] + 1.2 * torch.randn(900)).gt(0).long()
    x[:, 3] = 2 * verdict - 1 + 0.3 * torch.randn(900)
    if related:
        x[:, 4:] = 0.8 * x[:, 3:4] + 0.6 * torch.randn(900, 2)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, loaders(x, verdict), 4)


def sick():
    return training(related=False)


def healthy():
    return training(related=True)
