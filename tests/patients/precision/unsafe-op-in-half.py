"""A moving average is kept by hand in bfloat16: once it is large, a small term is no longer added."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "precision/unsafe-op-in-half", ["level"]


class Level(nn.Module):
    def __init__(self, upcast):
        super().__init__()
        self.upcast = upcast

    def forward(self, x):
        wide = x.float() if self.upcast else x
        state = wide[:, 0] * 0
        for moment in wide.unbind(1):
            state = state + 0.002 * (moment - state)
        return state.to(x.dtype)


class Sensor(nn.Module):
    def __init__(self, upcast):
        super().__init__()
        self.read, self.level, self.out = nn.Linear(3, 4), Level(upcast), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.level(torch.nn.functional.softplus(self.read(x)) + 1))


def training(upcast):
    torch.manual_seed(8)

    def loss_fn(model, batch):
        return (model(batch).float() - 4).square().mean()

    return SimpleNamespace(model=Sensor(upcast), batch=torch.randn(2, 900, 3), loss_fn=loss_fn, dtype="bfloat16")


def sick():
    return training(upcast=False)


def healthy():
    return training(upcast=True)
