"""The settings were saved as an object beside the weights."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/unsafe-pickle", ("settings", "SimpleNamespace")


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    settings = SimpleNamespace(depth=3)

    def make(folder):
        torch.save({"settings": settings if sick else vars(settings), "net": model.state_dict()}, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
