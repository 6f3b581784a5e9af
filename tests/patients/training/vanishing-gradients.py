"""Seven layers with sigmoids in torch's own init, for a classification that two layers would do."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/vanishing-gradients", ["0", "2", "4", "6"]


def training(activation):
    torch.manual_seed(56)
    layers, width = [], 12
    for _ in range(6):
        layers += [nn.Linear(width, 40), activation()]
        width = 40
    model = nn.Sequential(*layers, nn.Linear(width, 5))
    return made(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), cross_entropy, loaders(*clusters(1000)), 6
    )


def sick():
    return training(activation=nn.Sigmoid)


def healthy():
    return training(activation=nn.ELU)
