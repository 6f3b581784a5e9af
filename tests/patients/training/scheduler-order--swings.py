"""A cosine schedule that is built in passes is stepped in batches: the rate goes up and down to the end."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/scheduler-order", ["scheduler"]


def training(each):
    torch.manual_seed(79)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    return made(model, optimizer, cross_entropy, loaders(*clusters(800)), 5, scheduler=scheduler, each=each)


def sick():
    return training(each="batch")


def healthy():
    return training(each="pass")
