"""A function of its own keeps its output on its context; each holds the other until Python's collector comes."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/graph-retained", ["ctx.y"], "ctx.y = y"


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y * (1 - ctx.y)


class Saved(Kept):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


def scoring(function):
    torch.manual_seed(4)
    model = nn.Linear(20, 400)
    return SimpleNamespace(
        model=model,
        optimizer=None,
        step=lambda: function.apply(model(torch.ones(300, 20))).sum().item(),
        steps=3,
        names={},
    )


def sick():
    return scoring(Kept)


def healthy():
    return scoring(Saved)
