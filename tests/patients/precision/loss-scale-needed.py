"""The loss is a mean over very many pixels of small errors: in float16 no gradient is left."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "precision/loss-scale-needed", ["0.weight", "0.bias", "2.weight", "2.bias"]


def training(weight):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    x = torch.rand(2, 1, 12, 12)

    def loss_fn(model, batch):
        return 1 + weight * (model(batch).float() - batch).square().mean()

    return SimpleNamespace(model=model, batch=x, loss_fn=loss_fn, dtype="float16")


def sick():
    return training(weight=1e-7)


def healthy():
    return training(weight=1.0)
