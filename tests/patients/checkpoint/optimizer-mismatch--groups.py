"""Body and head, equal layers with rates of their own, are given to the new optimizer in another order."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/optimizer-mismatch", ()


def training(order):
    body, head = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(body, head)
    groups = [{"params": body.parameters(), "lr": 1e-4}, {"params": head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    again = [{"params": body.parameters(), "lr": 1e-4}, {"params": head.parameters(), "lr": 1e-2}]
    new = torch.optim.AdamW([again[number] for number in order])

    def make(folder):
        torch.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model, optimizer=new)


def sick():
    return training((1, 0))


def healthy():
    return training((0, 1))
