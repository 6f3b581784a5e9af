"""A class and a place in pixels are learned together, with clipping: the squares of pixels leave the class nothing."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, loaders, made

CODE, WHERE, RUN = "training/over-regularized", ["loss_fn"], True


def training(pixels):
    torch.manual_seed(70)
    x, y = clusters(500, classes=4, spread=1.0)
    place = torch.rand(500, 4)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def loss_fn(model, batch):
        out = model(batch[0])
        box = F.mse_loss(out[:, :4], batch[1][:, :4] * pixels)
        return box + F.cross_entropy(out[:, 4:], batch[1][:, 4].long())

    pair = loaders(torch.cat([x, place], 1), torch.cat([place, y[:, None]], 1))
    return made(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss_fn, pair, 12, clip=1.0)


def sick():
    return training(pixels=1500)


def healthy():
    return training(pixels=1)
