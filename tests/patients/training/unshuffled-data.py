"""Rows come sorted by their target, from the smallest to the largest."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made, mse

CODE, WHERE = "training/unshuffled-data", ["train_loader"]


def training(shuffle):
    torch.manual_seed(49)
    x = torch.randn(1600, 8)
    y = (x[:, :1] * 2 + torch.sin(3 * x[:, 1:2])) + 3
    order = y[:, 0].argsort()
    pair = (
        DataLoader(TensorDataset(x[order][::2], y[order][::2]), batch_size=32, shuffle=shuffle),
        DataLoader(TensorDataset(x[order][1::4], y[order][1::4]), batch_size=64),
    )
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    return made(model, torch.optim.SGD(model.parameters(), lr=0.05), mse, pair, 6)


def sick():
    return training(shuffle=False)


def healthy():
    return training(shuffle=True)
