"""A decay that was meant once a pass is applied once a batch: after a pass the rate is a thousandth."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/scheduler-order", ["scheduler"]


def training(each):
    torch.manual_seed(46)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    return made(model, optimizer, cross_entropy, loaders(*clusters(1000)), 4, scheduler=scheduler, each=each)


def sick():
    return training(each="batch")


def healthy():
    return training(each="pass")
