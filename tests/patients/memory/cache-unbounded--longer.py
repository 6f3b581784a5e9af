"""The features of all steps so far are one tensor, which each step makes longer; no list grows."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/cache-unbounded", ["memory.bank"], "memory.bank = torch.cat"


def contrast(rows):
    torch.manual_seed(4)
    encoder = nn.Linear(32, 1024)
    memory = SimpleNamespace(bank=torch.zeros(0, 1024))

    def step():
        with torch.no_grad():
            features = encoder(torch.randn(400, 32))
        memory.bank = torch.cat([features, memory.bank])[:rows]
        return (memory.bank[:4] @ features.T).mean()

    return SimpleNamespace(model=encoder, optimizer=None, step=step, steps=3, names={"memory": memory})


def sick():
    return contrast(None)


def healthy():
    return contrast(400)
