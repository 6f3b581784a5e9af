"""A recurrent layer without batch_first is given (batch, time, features): it reads across the samples."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/batch-mixing", ["read", "forward", "lstm"]


class Reader(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.read, self.out = nn.LSTM(3, 16, batch_first=batch_first), nn.Linear(16, 2)

    def forward(self, series):
        return self.out(self.read(series)[0][:, -1])


def training(batch_first):
    torch.manual_seed(67)
    series = torch.randn(800, 9, 3)
    label = (series[:, :, 0].sum(1) > 0).long()
    model = Reader(batch_first)
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), cross_entropy, loaders(series, label), 6)


def sick():
    return training(batch_first=False)


def healthy():
    return training(batch_first=True)
