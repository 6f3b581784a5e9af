"""Milestones were copied from a recipe of another length: the rate is cut twice in the first two passes."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/plateau", ["scheduler", "lr"]


def training(milestones):
    torch.manual_seed(47)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.05)
    return made(model, optimizer, cross_entropy, loaders(*clusters(1000)), 5, scheduler=scheduler, each="pass")


def sick():
    return training(milestones=[1, 2])


def healthy():
    return training(milestones=[7, 9])
