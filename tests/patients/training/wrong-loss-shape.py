"""A squared error written by hand: outputs of (32, 1) minus targets of (32,)."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/wrong-loss-shape", ["loss_fn"]


def training(flat):
    torch.manual_seed(65)
    x = torch.randn(900, 5)
    y = 3 + x[:, 0] * 2 - x[:, 1]
    model = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1))

    def loss_fn(model, batch):
        guess = model(batch[0])
        if flat:
            guess = guess.squeeze(1)
        return (guess - batch[1]).square().mean()

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, y), 6)


def sick():
    return training(flat=False)


def healthy():
    return training(flat=True)
