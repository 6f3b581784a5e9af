"""The optimizer was built over the layers in another order: nothing fails, and moments go to other weights."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/optimizer-mismatch", ("0.weight",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    order = [*model[2].parameters(), *model[0].parameters()] if sick else [*model.parameters()]
    new = torch.optim.Adam(order)

    def make(folder):
        torch.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model, optimizer=new)


def sick():
    return training(True)


def healthy():
    return training(False)
