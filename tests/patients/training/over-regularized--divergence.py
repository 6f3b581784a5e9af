"""A variational autoencoder of readings: the divergence weighs as much as the error, and the code says nothing."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/over-regularized", ["loss_fn"]


def training(weight):
    torch.manual_seed(82)
    phase = torch.rand(800, 1) * 6
    readings = torch.sin(phase + torch.linspace(0, 3, 14)) * 0.5
    model = nn.ModuleDict({"encode": nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 6))})
    model["decode"] = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 14))

    def loss_fn(model, batch):
        mean, spread = model["encode"](batch[0]).chunk(2, 1)
        again = model["decode"](mean + torch.randn_like(mean) * (spread / 2).exp())
        divergence = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
        return (again - batch[0]).square().mean() + weight * divergence

    return made(model, torch.optim.Adam(model.parameters(), lr=4e-3), loss_fn, loaders(readings, phase), 7)


def sick():
    return training(weight=1.0)


def healthy():
    return training(weight=1e-3)
