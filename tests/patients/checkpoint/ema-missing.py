"""The average was not saved."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/ema-missing", ("run.pt",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    ema = copy.deepcopy(model)

    def make(folder):
        state = {"net": model.state_dict(), "step": 7}
        if not sick:
            state["ema"] = ema.state_dict()
        torch.save(state, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model, ema=ema)


def sick():
    return training(True)


def healthy():
    return training(False)
