"""Adam with a rate that was meant for plain SGD: after the first steps the network says the same to everybody."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/lr-too-high", ["lr"]


def training(lr):
    torch.manual_seed(40)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    return made(model, torch.optim.Adam(model.parameters(), lr=lr), cross_entropy, loaders(*clusters(1000)), 4)


def sick():
    return training(lr=3.0)


def healthy():
    return training(lr=1e-3)
