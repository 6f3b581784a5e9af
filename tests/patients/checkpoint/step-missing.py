"""The loop begins at zero after a restart, and uses the first batches again."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/step-missing", ("run.pt", "step")


def training(sick):
    def train(state, last):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if state:
            model.load_state_dict(state["net"])
            optimizer.zero_grad()
        data = torch.randn(10, 6, 4, generator=torch.Generator().manual_seed(0))
        losses = []
        for step in range(state.get("step", 0), state.get("step", 0) + last):
            loss = (model(data[step]) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    def make(folder: pathlib.Path):
        state = {"net": train({}, 4)[1].state_dict()}
        if not sick:
            state["step"] = 4
        torch.save(state, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(
        make=make, resumed=lambda path: train(torch.load(path), 6)[0], uninterrupted=lambda: train({}, 10)[0][4:]
    )


def sick():
    return training(True)


def healthy():
    return training(False)
