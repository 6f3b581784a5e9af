"""The loading takes the averaged weights, which carry a wrapper's prefix; the plain ones beside them would fit."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/prefix-module", ["module.0.weight", "module.0.bias"]


def saving(plain):
    model = nn.Sequential(nn.Linear(4, 3))

    def make(folder):
        path = pathlib.Path(folder) / "run.pt"
        averaged = {k if plain else f"module.{k}": v + 1 for k, v in model.state_dict().items()}
        torch.save({"model": model.state_dict(), "model_ema": averaged}, path)
        return path

    def load(path):
        model.load_state_dict(torch.load(path)["model_ema"])

    return SimpleNamespace(model=model, make=make, load=load)


def sick():
    return saving(plain=False)


def healthy():
    return saving(plain=True)
