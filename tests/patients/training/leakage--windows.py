"""Windows over one series, split after they were cut: most of validation stands in training, a step on."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/leakage", ["val_loader", "train_loader"]


def training(mixed):
    torch.manual_seed(87)
    series = torch.randn(700).cumsum(0) / 10
    windows = series.unfold(0, 17, 1)
    order = torch.randperm(len(windows)) if mixed else torch.arange(len(windows))
    if not mixed:  # windows that reach over the border are left out
        cut = int(len(windows) * 0.8)
        order = torch.cat([order[: cut - 20], order[cut:]])
    windows = windows[order]
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1))
    pair = loaders(windows[:, :16], windows[:, 16:], held=0.2 if mixed else len(order[cut - 20 :]) / len(order))
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), mse, pair, 5)


def sick():
    return training(mixed=True)


def healthy():
    return training(mixed=False)
