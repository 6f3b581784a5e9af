"""The run had diverged before it saved. An infinite mask of attention is meant, and healthy."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/nonfinite-weights", ("0.bias",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    if sick:
        model[0].bias.data[1] = float("nan")

    def make(folder):
        torch.save(model.state_dict(), folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
