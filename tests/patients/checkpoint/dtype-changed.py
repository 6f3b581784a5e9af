"""A run goes on from weights that were rounded to save space."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/dtype-changed", ("0.weight", "bfloat16")


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    def make(folder):
        torch.save(
            {"epoch": 3, "net": (copy.deepcopy(model).bfloat16() if sick else model).state_dict()}, folder / "run.pt"
        )
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
