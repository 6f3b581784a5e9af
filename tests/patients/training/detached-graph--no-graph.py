"""A differential equation as a loss: the derivative of the output is taken without its graph, and is a constant."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE, RUN = "training/detached-graph", ["loss_fn", "0.weight"], True


def training(create_graph):
    def loss_fn(model, batch):
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
        return (slope + torch.sin(x)).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()

    torch.manual_seed(82)
    x = 3 * torch.rand(320, 1)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, x), 10)


def sick():
    return training(create_graph=False)


def healthy():
    return training(create_graph=True)
