"""Two annotators; one of them had the two classes the other way round, for a third of the samples."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import clusters, cross_entropy, made

CODE, WHERE = "training/label-noise", ["train_loader"]


def training(swapped):
    torch.manual_seed(50)
    x, y = clusters(1500, classes=2, spread=0.8)
    taught = torch.where(torch.rand(1200) < swapped, 1 - y[:1200], y[:1200])
    pair = (
        DataLoader(
            TensorDataset(x[:1200], taught), batch_size=40, shuffle=True, generator=torch.Generator().manual_seed(1)
        ),
        DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=60),
    )
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 2))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, pair, 4)


def sick():
    return training(swapped=0.33)


def healthy():
    return training(swapped=0.0)
