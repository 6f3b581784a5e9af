"""The body was to be kept as it is, and goes on learning with the head: a letter is missing."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/frozen-parameters", ["requires_grad"]


def training(frozen):
    torch.manual_seed(64)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5))
    for p in model[0].parameters():
        if frozen:
            p.requires_grad_(False)
        else:
            p.require_grad = False
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, loaders(*clusters(600)), 5)


def sick():
    return training(frozen=False)


def healthy():
    return training(frozen=True)
