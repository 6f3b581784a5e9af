"""The function of LambdaLR returns the rate itself, which is multiplied by the optimizer's."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/scheduler-order", ["scheduler", "lr"], True


def training(first):
    torch.manual_seed(100)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: first * 0.97**epoch)
    return made(model, optimizer, cross_entropy, loaders(*clusters(500)), 8, scheduler=scheduler, each="pass")


def sick():
    return training(first=4e-3)


def healthy():
    return training(first=1.0)
