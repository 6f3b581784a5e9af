"""The run is saved within a window of four accumulated gradients, which are in no state dict."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/accumulation-not-resumed", ("run.pt", "model")


def training(sick):
    stop = 6 if sick else 8

    def train(state, last):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if state:
            model.load_state_dict(state["net"])
        data = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(0))
        losses = []
        for step in range(state.get("step", 0), last):
            loss = (model(data[step]) - 1).square().mean()
            (loss / 4).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    def make(folder: pathlib.Path):
        torch.save({"net": train({}, stop)[1].state_dict(), "step": stop}, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(
        make=make, resumed=lambda path: train(torch.load(path), 16)[0], uninterrupted=lambda: train({}, 16)[0][stop:]
    )


def sick():
    return training(True)


def healthy():
    return training(False)
