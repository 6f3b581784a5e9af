"""The first row of each batch's scores is kept as an array, and with it the whole tensor of the batch."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/view-keeps-storage", ["firsts"], "firsts.append("


def scoring(copied):
    torch.manual_seed(4)
    model, firsts = nn.Linear(10, 300), []

    def step():
        scores = model(torch.randn(500, 10)).detach().numpy()
        firsts.append(scores[0].copy() if copied else scores[0])

    return SimpleNamespace(model=model, optimizer=None, step=step, steps=3, names={"firsts": firsts})


def sick():
    return scoring(copied=False)


def healthy():
    return scoring(copied=True)
