"""Gradients that are clipped to next to nothing: the rate is a usual one, and no weight moves. The twin clips at 1."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/lr-too-low", ["clip_grad_norm_"], True


def training(norm):
    torch.manual_seed(98)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return made(model, optimizer, cross_entropy, loaders(*clusters(800)), 8, clip=norm)


def sick():
    return training(norm=1e-4)


def healthy():
    return training(norm=1.0)
