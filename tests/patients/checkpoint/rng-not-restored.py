"""Dropout draws other numbers after a restart."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/rng-not-restored", ("run.pt", "random")


def training(sick):
    def train(state, last):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if state:
            model.load_state_dict(state["net"])
            torch.set_rng_state(state.get("rng", torch.get_rng_state()))
        data = torch.randn(10, 6, 4, generator=torch.Generator().manual_seed(0))
        losses = []
        for step in range(4 * bool(state), 4 * bool(state) + last):
            loss = (model(data[step]) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    def make(folder: pathlib.Path):
        state = {"net": train({}, 4)[1].state_dict()}
        if not sick:
            state["rng"] = torch.get_rng_state()
        torch.save({"step": 4} | state, folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(
        make=make, resumed=lambda path: train(torch.load(path), 6)[0], uninterrupted=lambda: train({}, 10)[0][4:]
    )


def sick():
    return training(True)


def healthy():
    return training(False)
