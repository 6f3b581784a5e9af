"""Cosines of two views are multiplied by the temperature that they were to be divided by."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import plainly

CODE, WHERE, RUN = "training/wrong-output-activation", ["forward"], True


def training(divide):
    torch.manual_seed(80)
    x = torch.randn(320, 16)
    train_loader, val_loader = (
        DataLoader(TensorDataset(part + 0.2 * torch.randn(part.shape), part), 32) for part in (x[:256], x[256:])
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    own = torch.eye(64, dtype=torch.bool)
    other = torch.arange(64).roll(32)

    def loss_fn(model, batch):
        views = F.normalize(torch.cat([model(batch[0]), model(batch[1])]), dim=1)
        scores = views @ views.T / 0.1 if divide else views @ views.T * 0.1
        return F.cross_entropy(scores.masked_fill(own, -1e9), other)

    parts = {"train_loader": train_loader, "val_loader": val_loader, "scheduler": None}
    train = plainly(model, optimizer, loss_fn, train_loader, 12)
    return SimpleNamespace(model=model, optimizer=optimizer, loss_fn=loss_fn, train=train, **parts)


def sick():
    return training(divide=False)


def healthy():
    return training(divide=True)
