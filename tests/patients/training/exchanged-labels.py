"""A Siamese network whose loss takes 1 for unlike, with pairs of which 1 means alike."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import pairwise_distance
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import clusters, plainly

CODE, WHERE = "training/exchanged-labels", ["train_loader", "label"]


def training(unlike):
    torch.manual_seed(72)
    x, kind = clusters(800, 3)
    alike = (kind[:400] == kind[400:]).float()
    pairs = TensorDataset(x[:400], x[400:], 1 - alike if unlike else alike)
    train_loader = DataLoader(torch.utils.data.Subset(pairs, range(320)), 32, shuffle=True)
    val_loader = DataLoader(torch.utils.data.Subset(pairs, range(320, 400)), 32)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_fn(model, batch):
        one, other, label = batch
        distance = pairwise_distance(model(one), model(other))
        return ((1 - label) * distance**2 + label * (1.5 - distance).clamp_min(0) ** 2).mean()

    train = plainly(model, optimizer, loss_fn, train_loader, 6)
    parts = {"train_loader": train_loader, "val_loader": val_loader, "scheduler": None}
    return SimpleNamespace(model=model, optimizer=optimizer, loss_fn=loss_fn, train=train, **parts)


def sick():
    return training(unlike=False)


def healthy():
    return training(unlike=True)
