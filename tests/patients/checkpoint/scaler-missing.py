"""The scale was not saved."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/scaler-missing", ("run.pt",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")

    def make(folder):
        state = {"net": model.state_dict(), "step": 7}
        if not sick:
            state["scaler"] = scaler.state_dict()
        torch.save(state, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model, scaler=scaler)


def sick():
    return training(True)


def healthy():
    return training(False)
