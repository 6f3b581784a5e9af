"""F.dropout in a forward, which is not told of the mode; attention's dropout_p is."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, cross_entropy, loaders, made, validation

CODE, WHERE = "training/train-mode-in-eval", ["forward", "dropout"]


class Dropping(nn.Module):
    def __init__(self, told):
        super().__init__()
        self.first, self.last, self.told = nn.Linear(12, 64), nn.Linear(64, 5), told

    def forward(self, x):
        h = self.first(x).relu()
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.1 * self.training)
        h = F.dropout(h, 0.5, self.training) if self.told else F.dropout(h, 0.5)
        return self.last(h)


class Rows(Dropping):
    def forward(self, x):
        return super().forward(x[:, None])[:, 0]


def training(told):
    torch.manual_seed(104)
    model, pair = Rows(told), loaders(*clusters(900, spread=1.5))
    check = validation(model, cross_entropy, pair[1])
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, pair, 5, validate=check)


def sick():
    return training(told=False)


def healthy():
    return training(told=True)
