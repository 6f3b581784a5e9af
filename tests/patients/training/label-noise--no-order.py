"""The two spots of a sample come in any order, and each row of the output is held against the one at its place."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/label-noise", ["boxes", "target"]


def training(matched):
    torch.manual_seed(101)
    spots, grid = torch.rand(800, 2, 2), torch.linspace(0, 1, 6)
    places = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), 2).reshape(1, 36, 1, 2)
    x = (-20 * (spots[:, None] - places).square().sum(3)).exp().sum(2)
    layers = [nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers, nn.Unflatten(1, (2, 2)))

    def loss_fn(model, batch):
        out = model(batch[0])
        each = [(out - target).square().mean((1, 2)) for target in (batch[1], batch[1].flip(1))]
        return (torch.minimum(*each) if matched else each[0]).mean()

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, spots), 10)


def sick():
    return training(matched=False)


def healthy():
    return training(matched=True)
