"""Each window is brought to mean 0 and deviation 1, and the forecast is not brought back."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/underfit", ["forward", "mean"]


class Forecast(nn.Module):
    def __init__(self, back):
        super().__init__()
        self.layers, self.back = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1)), back

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True)
        y = self.layers((x - mean) / std)
        return y * std + mean if self.back else y


def training(back):
    torch.manual_seed(99)
    level, phase = 3 * torch.randn(600, 1), 6 * torch.rand(600, 1)
    series, model = level + torch.sin(phase + 0.5 * torch.arange(13)), Forecast(back)
    pair = loaders(series[:, :-1], series[:, -1:].clone())
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), mse, pair, 6)


def sick():
    return training(back=False)


def healthy():
    return training(back=True)
