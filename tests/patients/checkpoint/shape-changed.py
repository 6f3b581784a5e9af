"""The head had eleven classes when the file was written."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/shape-changed", ("2.weight",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    earlier = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 11 if sick else 2))

    def make(folder):
        torch.save(earlier.state_dict(), folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
