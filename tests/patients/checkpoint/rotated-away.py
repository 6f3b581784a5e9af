"""The rotation deleted the file that the pointer names."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/rotated-away", ("latest", "step20.pt")


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    def make(folder):
        for step in (20, 30) if not sick else (30,):
            torch.save(model.state_dict(), folder / f"step{step}.pt")
        (folder / "latest").write_text("step20.pt")
        return folder

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
