"""A warm-up of a tenth more each pass is stepped each batch: the rate grows until the run breaks."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/scheduler-order", ["scheduler"]


def training(each):
    torch.manual_seed(65)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.1**n)
    return made(model, optimizer, cross_entropy, loaders(*clusters(1000)), 4, scheduler=scheduler, each=each)


def sick():
    return training(each="batch")


def healthy():
    return training(each="pass")
