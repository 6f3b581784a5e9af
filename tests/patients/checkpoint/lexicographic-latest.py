"""Epoch 9 is the last of the sorted folder; epoch 10 is the newest."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/lexicographic-latest", ("epoch9.pt", "epoch10.pt")


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    def make(folder):
        for epoch in (8, 9, 10):
            torch.save(model.state_dict(), folder / f"epoch{epoch if sick else f'{epoch:02}'}.pt")
        return sorted(folder.glob("*.pt"))[-1]

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
