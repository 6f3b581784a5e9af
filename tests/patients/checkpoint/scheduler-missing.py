"""The count of the scheduler was not saved."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/scheduler-missing", ("run.pt",)


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def make(folder):
        state = {"net": model.state_dict(), "step": 7}
        if not sick:
            state["scheduler"] = scheduler.state_dict()
        torch.save(state, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model, scheduler=scheduler)


def sick():
    return training(True)


def healthy():
    return training(False)
