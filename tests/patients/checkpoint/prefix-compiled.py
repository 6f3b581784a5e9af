"""A file of a compiled model is loaded into the bare one."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/prefix-compiled", ("_orig_mod.0.weight",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    def make(folder):
        torch.save((torch.compile(model, backend="eager") if sick else model).state_dict(), folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
