"""Discs are to be found, and the overlap with them is what is minimized."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/loss-sign", ["loss_fn"]


def training(reversed_):
    torch.manual_seed(93)
    places = torch.linspace(-1, 1, 12)
    distance = (places[:, None] ** 2 + (places - torch.rand(240, 1, 1) + 0.5) ** 2).sqrt()
    mask = (distance < 0.5).float()[:, None]
    picture = mask + 0.3 * torch.randn(240, 1, 12, 12)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))

    def loss_fn(model, batch):
        shares, mask = model(batch[0]).sigmoid().flatten(1), batch[1].flatten(1)
        both = 2 * (shares * mask).sum(1) + 1
        overlap = (both / (shares.sum(1) + mask.sum(1) + 1)).mean()
        return overlap if reversed_ else 1 - overlap

    pair = DataLoader(TensorDataset(picture, mask), 16, shuffle=True), None
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, pair, 6)


def sick():
    return training(reversed_=True)


def healthy():
    return training(reversed_=False)
