"""Pairs with labels of 1 and 0 under a loss that takes 1 and -1: unlike pairs teach nothing."""

import torch
from torch import nn

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/label-out-of-range", ["target", "cosine_embedding_loss"]


def training(unlike):
    torch.manual_seed(91)
    x, y = clusters(800, classes=4)
    pairs, same = torch.cat([x[:400], x[400:]], 1), y[:400] == y[400:]
    model, criterion = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8)), nn.CosineEmbeddingLoss()

    def loss_fn(model, batch):
        left, right = batch[0].chunk(2, 1)
        return criterion(model(left), model(right), batch[1])

    pair = loaders(pairs, torch.where(same, 1, unlike))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, pair, 5)


def sick():
    return training(unlike=0)


def healthy():
    return training(unlike=-1)
