"""A warm-up is a share of the steps that nobody limits at one: the rate rises to the end of the run."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/scheduler-order", ["scheduler", "lr"], True


def training(limit):
    torch.manual_seed(63)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(limit, (step + 1) / 4))
    pair = loaders(*clusters(600, classes=6, spread=0.8))
    return made(model, optimizer, cross_entropy, pair, 12, scheduler=scheduler, each="batch")


def sick():
    return training(limit=1e9)


def healthy():
    return training(limit=1)
