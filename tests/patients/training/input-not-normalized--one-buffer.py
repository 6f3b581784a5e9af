"""A data set writes each sample into the same array, and gives a tensor that shares its memory."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.training.loops import clusters, cross_entropy, made

CODE, WHERE = "training/input-not-normalized", ["dataset", "__getitem__"]


class Rows(Dataset):
    def __init__(self, x, y, copied):
        self.x, self.y, self.copied, self.buffer = x.numpy(), y, copied, np.zeros(12, np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.buffer[:] = self.x[i]
        return torch.from_numpy(self.buffer.copy() if self.copied else self.buffer), self.y[i]


def training(copied):
    torch.manual_seed(116)
    x, y = clusters(1000)
    pair = DataLoader(Rows(x[:800], y[:800], copied), 32, shuffle=True), DataLoader(Rows(x[800:], y[800:], copied), 50)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, pair, 6)


def sick():
    return training(copied=False)


def healthy():
    return training(copied=True)
