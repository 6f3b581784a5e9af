"""A multi-label tagger ends in a sigmoid, and its loss is the one that takes logits."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/double-softmax", ["sigmoid", "forward", "loss_fn"]


class Tagger(nn.Module):
    def __init__(self, squash):
        super().__init__()
        self.body, self.tags, self.squash = nn.Linear(10, 24), nn.Linear(24, 4), squash

    def forward(self, x):
        scores = self.tags(torch.relu(self.body(x)))
        return torch.sigmoid(scores) if self.squash else scores


def loss_fn(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def training(squash):
    torch.manual_seed(63)
    x = torch.randn(800, 10)
    tags = (x[:, :4] + x[:, 4:8] > 0).float()
    model = Tagger(squash)
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, tags), 6)


def sick():
    return training(squash=True)


def healthy():
    return training(squash=False)
