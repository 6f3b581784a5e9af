"""Two tasks share a network, and the squared error of one, in thousands, leaves nothing to the other."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/over-regularized", ["loss_fn", "model"]


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 20), nn.ReLU())
        self.kind, self.size = nn.Linear(20, 4), nn.Linear(20, 2)

    def forward(self, x):
        shared = self.body(x)
        return self.kind(shared), self.size(shared)


def training(unit):
    torch.manual_seed(98)
    kind, size = torch.randint(0, 4, (1600,)), torch.rand(1600, 2)
    x = torch.cat([F.one_hot(kind, 4), 2 * size - 1], 1) @ torch.randn(6, 24) / 2.5 + 0.15 * torch.randn(1600, 24)
    model = Both()

    def loss_fn(model, batch):
        scores, sizes = model(batch[0])
        return F.cross_entropy(scores, batch[1]) + F.mse_loss(sizes, unit * batch[2])

    pair = DataLoader(TensorDataset(x, kind, size), 50, shuffle=True), None
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss_fn, pair, 8)


def sick():
    return training(unit=500)


def healthy():
    return training(unit=1)
