"""The loss ignores class 0, as that of another data set did, where 0 was padding."""

import torch
from torch import nn

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/class-ignored", ["loss_fn", "ignore_index"]


def training(ignored):
    torch.manual_seed(71)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    criterion = nn.CrossEntropyLoss(ignore_index=ignored)

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return made(model, optimizer, loss_fn, loaders(*clusters(400, 4)), 5)


def sick():
    return training(ignored=0)


def healthy():
    return training(ignored=-100)
