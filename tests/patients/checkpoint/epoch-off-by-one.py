"""The epoch that is over is saved, and the loop begins with it: each restart runs it once more."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/epoch-off-by-one", ("run.pt", "epoch")


def training(sick):
    data = torch.randn(7, 6, 4, generator=torch.Generator().manual_seed(0))

    def train(state, last):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if state:
            model.load_state_dict(state["net"])
        losses = []
        for epoch in range(state.get("epoch", 0), last):
            for rows in data[epoch].split(3):
                loss = (model(rows) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            state = {"net": model.state_dict(), "epoch": epoch if sick else epoch + 1}
        return losses, state

    def make(folder: pathlib.Path):
        torch.save(train({}, 3)[1], folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(
        make=make, resumed=lambda path: train(torch.load(path), 7)[0], uninterrupted=lambda: train({}, 7)[0][6:]
    )


def sick():
    return training(True)


def healthy():
    return training(False)
