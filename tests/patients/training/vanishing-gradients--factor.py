"""A frozen layer with an adapter whose alpha was written as a learning rate: what it adds is a ten-thousandth."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/vanishing-gradients", ["down", "up"]


class Adapted(nn.Module):
    def __init__(self, alpha, rank=4):
        super().__init__()
        self.base = nn.Linear(12, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(12, rank, bias=False), nn.Linear(rank, 5, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


def training(alpha):
    torch.manual_seed(54)
    model = Adapted(alpha)
    trained = [p for p in model.parameters() if p.requires_grad]
    return made(model, torch.optim.Adam(trained, lr=1e-2), cross_entropy, loaders(*clusters(600)), 8)


def sick():
    return training(alpha=4e-4)


def healthy():
    return training(alpha=4.0)
