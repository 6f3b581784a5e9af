"""The overlap of boxes that don't meet is zero, and so is its gradient."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/vanishing-gradients", ["loss_fn", "train"]


def training(distance):
    torch.manual_seed(81)
    x = torch.randn(320, 4)
    model = nn.Linear(4, 1)

    def loss_fn(model, batch):
        """Of intervals with a length of 1, that begin there."""
        apart = (model(batch[0]) - batch[1]).abs()
        loss = 1 - (1 - apart).clamp_min(0)
        return (loss + apart if distance else loss).mean()

    pair = loaders(x, 20 + x[:, :1], 16)
    return made(model, torch.optim.Adam(model.parameters(), lr=0.2), loss_fn, pair, 12)


def sick():
    return training(distance=False)


def healthy():
    return training(distance=True)
