"""Weights of samples multiply a cross entropy that is already the mean over the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import clusters, made

CODE, WHERE = "training/wrong-loss-shape", ["loss_fn"]


def training(reduction):
    torch.manual_seed(103)
    x, y = clusters(1000, spread=1.5)
    rows = TensorDataset(x, y, torch.where(y == 0, 10.0, 1.0))
    train, val = torch.utils.data.random_split(rows, [800, 200])
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))

    def loss_fn(model, batch):
        x, y, weight = batch
        return (F.cross_entropy(model(x), y, reduction=reduction) * weight).mean()

    pair = DataLoader(train, 32, shuffle=True), DataLoader(val, 50)
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, pair, 6)


def sick():
    return training("mean")


def healthy():
    return training("none")
