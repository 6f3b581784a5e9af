"""A code of whole numbers in the middle: round passes the value, and a gradient of zero."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/detached-graph", ["encode", "forward"]


class Code(nn.Module):
    def __init__(self, straight):
        super().__init__()
        self.encode, self.decode, self.straight = nn.Linear(10, 6), nn.Linear(6, 10), straight

    def forward(self, x):
        soft = 2 * self.encode(x)
        hard = torch.round(soft)
        return self.decode(soft + (hard - soft).detach() if self.straight else hard)


def training(straight):
    torch.manual_seed(90)
    x = torch.randn(500, 3) @ torch.randn(3, 10)
    model = Code(straight)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[0])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, x), 5)


def sick():
    return training(straight=False)


def healthy():
    return training(straight=True)
