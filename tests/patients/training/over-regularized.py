"""A penalty on the squared weights, summed over all layers and not weighed against the loss."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/over-regularized", ["loss_fn"]


def training(weight):
    torch.manual_seed(59)
    x = torch.randn(800, 8)
    y = x[:, :1] - x[:, 1:2] + torch.sin(2 * x[:, 2:3])
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss_fn(model, batch):
        penalty = sum(p.square().sum() for p in model.parameters())
        return nn.functional.mse_loss(model(batch[0]), batch[1]) + weight * penalty

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, y), 6)


def sick():
    return training(weight=0.5)


def healthy():
    return training(weight=1e-4)
