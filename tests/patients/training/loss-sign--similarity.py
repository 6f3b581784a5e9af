"""Vectors are to be predicted, and their cosine similarity with the right ones is what is minimized."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/loss-sign", ["loss_fn", "cosine_similarity"]
RUN = True


def training(reversed_):
    torch.manual_seed(94)
    x = torch.randn(600, 16)
    vectors = torch.tanh(x @ torch.randn(16, 8))
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 8))

    def loss_fn(model, batch):
        similarity = F.cosine_similarity(model(batch[0]), batch[1], dim=1).mean()
        return similarity if reversed_ else 1 - similarity

    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss_fn, loaders(x, vectors), 8)


def sick():
    return training(reversed_=True)


def healthy():
    return training(reversed_=False)
