"""Validation pictures were read by another library: blue comes first."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import cross_entropy, made

CODE, WHERE = "training/preprocessing-mismatch", ["val_loader"]


def training(reverse):
    torch.manual_seed(71)
    colour = torch.tensor([0.4, 0.0, -0.5]).view(3, 1, 1)
    x = torch.randn(900, 3, 6, 6) * 0.6 + colour + torch.randn(900, 1, 1, 1) * 0.2
    label = (x[:, 0].mean((1, 2)) > x[:, 1].mean((1, 2)) + 0.4).long()
    val = x[700:].flip(1) if reverse else x[700:]
    pair = (
        DataLoader(TensorDataset(x[:700], label[:700]), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(val, label[700:]), batch_size=64),
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, pair, 4)


def sick():
    return training(reverse=True)


def healthy():
    return training(reverse=False)
