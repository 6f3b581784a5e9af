"""A table for a hundred thousand users is trained by Adam with four of them in a batch."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/optimizer-state-dominates", ["users.weight"], None


def training(make, sparse):
    torch.manual_seed(4)
    model = nn.Sequential()
    model.add_module("users", nn.Embedding(100_000, 40, sparse=sparse))
    model.add_module("score", nn.Linear(40, 1, bias=False).requires_grad_(False))
    optimizer = make([model.users.weight])

    def step():
        optimizer.zero_grad()
        model(torch.tensor([3, 14, 1592, 6535])).sum().backward()
        optimizer.step()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2, names={})


def sick():
    return training(torch.optim.Adam, sparse=False)


def healthy():
    return training(lambda parameters: torch.optim.SGD(parameters, lr=0.1), sparse=True)
