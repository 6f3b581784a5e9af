"""A head for each of three quantities: the loop over them assigns the loss in place of adding, and the last remains."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/detached-graph", ["heads.0.weight", "loss_fn"]


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 24)
        self.heads = nn.ModuleList(nn.Linear(24, 1) for _ in range(3))

    def forward(self, x):
        return [head(self.body(x).relu()).squeeze(1) for head in self.heads]


def training(added):
    def loss_fn(model, batch):
        loss = torch.zeros(())
        for output, target in zip(model(batch[0]), batch[1].T):
            error = F.mse_loss(output, target)
            loss = loss + error if added else error
        return loss

    torch.manual_seed(64)
    x, model = torch.randn(600, 8), Heads()
    y = x[:, :3] * x[:, 3:6].sign()
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, y), 5)


def sick():
    return training(added=False)


def healthy():
    return training(added=True)
