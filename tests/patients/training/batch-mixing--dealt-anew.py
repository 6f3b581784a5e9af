"""The samples of a batch are dealt anew, and their labels are not."""

import torch
from torch import nn

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/batch-mixing", ["loss_fn", "cross_entropy"]


def training(both):
    torch.manual_seed(74)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))

    def loss_fn(model, batch):
        x, y = batch
        order = torch.randperm(len(x))
        return nn.functional.cross_entropy(model(x[order]), y[order] if both else y)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return made(model, optimizer, loss_fn, loaders(*clusters(400, spread=2.0)), 5)


def sick():
    return training(both=False)


def healthy():
    return training(both=True)
