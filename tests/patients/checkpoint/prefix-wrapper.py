"""The trainer held the network as its attribute, and the file has the names of the trainer."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/prefix-wrapper", ("network.0.weight",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    def make(folder):
        torch.save({f"network.{n}" if sick else n: v for n, v in model.state_dict().items()}, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
