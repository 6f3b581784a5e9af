"""Sixty rows, forty features of which two count, and a hundred passes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made, mse

CODE, WHERE = "training/overfit", ["train_loader", "model"]


def training(rows, passes):
    torch.manual_seed(51)
    x = torch.randn(rows + 200, 40)
    y = x[:, :1] + x[:, 1:2] * 0.5 + torch.randn(rows + 200, 1) * 0.7
    pair = (
        DataLoader(TensorDataset(x[:rows], y[:rows]), batch_size=20, shuffle=True),
        DataLoader(TensorDataset(x[rows:], y[rows:]), batch_size=50),
    )
    model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 1))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), mse, pair, passes)


def sick():
    return training(rows=60, passes=100)


def healthy():
    return training(rows=2000, passes=4)
