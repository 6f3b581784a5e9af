"""Windows of a series, each with the value after it as the target, are cut one place too long."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/leakage", ["features", "target"]


def training(ahead):
    torch.manual_seed(58)
    series = torch.sin(torch.arange(700) / 9) + torch.cumsum(0.2 * torch.randn(700), 0) * 0.3
    windows = series.unfold(0, 17, 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    pair = loaders(windows[:, :16, None], windows[:, 15 + ahead, None].clone())
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), mse, pair, 5)


def sick():
    return training(ahead=0)


def healthy():
    return training(ahead=1)
