"""The writer leaves out the second name of a shared tensor."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/tied-weights-missing", ("1.weight",)


def training(sick):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight

    def make(folder):
        torch.save({n: v for n, v in model.state_dict().items() if not sick or n != "1.weight"}, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
