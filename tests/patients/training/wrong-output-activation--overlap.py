"""A Dice loss of raw scores: of those there is no lowest value."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/wrong-output-activation", ["loss_fn", "forward"]


def training(probabilities):
    torch.manual_seed(75)
    mask = torch.zeros(200, 1, 8, 8)
    for i, (row, column) in enumerate(torch.randint(0, 5, (200, 2)).tolist()):
        mask[i, 0, row : row + 3, column : column + 3] = 1
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def loss_fn(model, batch):
        out = model(batch[0])
        out = out.sigmoid() if probabilities else out
        return 1 - (2 * (out * batch[1]).sum() + 1) / (out.sum() + batch[1].sum() + 1)

    pair = loaders(mask + 0.5 * torch.randn(mask.shape), mask, 16)
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, pair, 4)


def sick():
    return training(probabilities=False)


def healthy():
    return training(probabilities=True)
