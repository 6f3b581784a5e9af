"""A quarter of a million parameters for eighty pictures of eight by eight."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made, shapes

CODE, WHERE = "training/model-too-large-for-data", ["model"]


def training(width, pictures, passes):
    torch.manual_seed(52)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )
    return made(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        cross_entropy,
        loaders(*shapes(pictures, noise=2.5), batch=16),
        passes,
    )


def sick():
    return training(width=448, pictures=100, passes=40)


def healthy():
    return training(width=16, pictures=1500, passes=3)
