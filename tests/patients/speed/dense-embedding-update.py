"""Momentum for each word of a large vocabulary, though a batch reads a few dozen of them."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader

CODE, BOTTLENECK, LINE = "speed/dense-embedding-update", "optimizer", "words = nn.Embedding(200_000, 16, sparse=sparse)"


def training(sparse):
    torch.manual_seed(6)
    words = nn.Embedding(200_000, 16, sparse=sparse)
    model = nn.Sequential(words, nn.Flatten(), nn.Linear(64, 1))
    if sparse:
        optimizers = [torch.optim.SparseAdam([words.weight]), torch.optim.Adam(model[2].parameters())]
    else:
        optimizers = [torch.optim.Adam(model.parameters())]

    def step(x):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    loader = DataLoader(torch.randint(0, 200_000, (160, 4)), batch_size=16)
    return SimpleNamespace(model=model, optimizer=optimizers[-1], step=step, loader=loader)


def sick():
    return training(sparse=False)


def healthy():
    return training(sparse=True)
