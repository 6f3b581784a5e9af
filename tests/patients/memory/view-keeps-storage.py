"""The first position of every sequence is kept for a plot: a view, and with it all positions of the batch."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/view-keeps-storage", ["summaries"], "summaries.append"


def collecting(copies):
    torch.manual_seed(6)
    reader, summaries = nn.Linear(16, 64), []

    def step():
        with torch.no_grad():
            states = reader(torch.rand(16, 1024, 16))
        first = states[:, 0]
        summaries.append(first.clone() if copies else first)
        return first.mean()

    return SimpleNamespace(model=reader, optimizer=None, step=step, steps=3, names={"summaries": summaries})


def sick():
    return collecting(copies=False)


def healthy():
    return collecting(copies=True)
