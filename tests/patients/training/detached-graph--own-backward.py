"""Weights of plus and minus one with a derivative of their own, which lets gradients through on the wrong side."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/detached-graph", ["Sign", "backward"]


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, inside):
        ctx.save_for_backward(x)
        ctx.inside = inside
        return torch.where(x > 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        near = ctx.saved_tensors[0].abs() < 1
        return grad * (near if ctx.inside else ~near), None


class Signed(nn.Linear):
    inside = True

    def forward(self, x):
        return F.linear(x, Sign.apply(self.weight, self.inside), self.bias) / self.in_features**0.5


def training(inside):
    torch.manual_seed(94)
    model = nn.Sequential(Signed(12, 32), nn.Tanh(), nn.Linear(32, 5))
    model[0].inside = inside
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return made(model, optimizer, cross_entropy, loaders(*clusters(600, spread=1.5)), 8)


def sick():
    return training(inside=False)


def healthy():
    return training(inside=True)
