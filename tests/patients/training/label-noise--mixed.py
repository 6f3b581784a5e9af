"""Samples are mixed by pairs, and each keeps its own label, however little of it is left."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/label-noise", ["loss_fn", "target"]


def training(labels_too):
    torch.manual_seed(85)
    x, y = clusters(320)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, int(y.max()) + 1))

    def loss_fn(model, batch):
        x, y = batch
        if not model.training:
            return cross_entropy(model(x), y)
        share, order = float(torch.rand(())), torch.randperm(len(x))
        scores = model(share * x + (1 - share) * x[order])
        if not labels_too:
            return cross_entropy(scores, y)
        return share * cross_entropy(scores, y) + (1 - share) * cross_entropy(scores, y[order])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, y), 6)


def sick():
    return training(labels_too=False)


def healthy():
    return training(labels_too=True)
