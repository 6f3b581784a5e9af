"""The cell that makes the model ran again; the optimizer, two cells up, still holds the old model's tensors."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/parameters-not-in-optimizer", ["0", "2", "optimizer"]


def network():
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5))


def training(again):
    torch.manual_seed(62)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if again:
        model = network()
    return made(model, optimizer, cross_entropy, loaders(*clusters(600)), 4)


def sick():
    return training(again=True)


def healthy():
    return training(again=False)
