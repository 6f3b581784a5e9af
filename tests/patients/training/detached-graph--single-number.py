"""A series of single numbers goes through LayerNorm(1) before the recurrent layer: each comes out as zero."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/detached-graph", ["norm", "layer_norm"]


class Forecast(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.memory, self.head = norm, nn.GRU(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        _, last = self.memory(self.norm(x)[..., None] if self.norm.normalized_shape[0] > 1 else self.norm(x[..., None]))
        return self.head(last[-1])


def training(width):
    torch.manual_seed(71)
    x = torch.randn(600, 12).cumsum(1)
    y = x[:, -1:] - x[:, -3:-2]
    model = Forecast(nn.LayerNorm(width))
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), mse, loaders(x, y), 4)


def sick():
    return training(width=1)


def healthy():
    return training(width=12)
