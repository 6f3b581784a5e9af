"""A norm written by hand squares features of a few hundred: in float16 the sum of squares is infinite."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "precision/half-overflow", ["scale"]


class Scale(nn.Module):
    def __init__(self, upcast):
        super().__init__()
        self.gain, self.upcast = nn.Parameter(torch.ones(12)), upcast

    def forward(self, x):
        wide = x.float() if self.upcast else x
        return (wide / (wide * wide).sum(-1, keepdim=True).sqrt()).to(x.dtype) * self.gain


class Energy(nn.Module):
    def __init__(self, upcast):
        super().__init__()
        self.lift, self.scale, self.out = nn.Linear(5, 12), Scale(upcast), nn.Linear(12, 1)

    def forward(self, x):
        return self.out(self.scale(self.lift(x) * 300))


def training(upcast):
    torch.manual_seed(2)

    def loss_fn(model, batch):
        return (model(batch).float() - 1).square().mean()

    return SimpleNamespace(model=Energy(upcast), batch=torch.randn(16, 5), loss_fn=loss_fn, dtype="float16")


def sick():
    return training(upcast=False)


def healthy():
    return training(upcast=True)
