"""The dataset blanks a random part of each row in place, for augmentation: with each pass, more of the data is gone."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/input-not-normalized", ["dataset", "__getitem__"]


class Rows(Dataset):
    def __init__(self, x, y, copies):
        self.x, self.y, self.copies = x, y, copies

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        row = self.x[i].clone() if self.copies else self.x[i]
        first = torch.randint(0, 9, ()).item()
        row[first : first + 3] = 0
        return row, self.y[i]


def training(copies):
    torch.manual_seed(67)
    x, y = clusters(400, classes=3)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    pair = DataLoader(Rows(x[:320].clone(), y[:320], copies), 32, shuffle=True), loaders(x, y)[1]
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, pair, 6)


def sick():
    return training(copies=False)


def healthy():
    return training(copies=True)
