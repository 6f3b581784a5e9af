"""The mean of the training rows is not saved; the script that predicts takes that of its own rows."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/value-missing", ("rates.pt", "centre")


def training(kept):
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)) + torch.tensor([3.0, -2.0, 9.0])
    new = rows[:6] + 2

    def fresh():
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    def train():
        net, centre = fresh(), rows.mean(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(8):
            optimizer.zero_grad()
            (net(rows - centre) - rows.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        return net, centre

    def answers(net, centre):
        with torch.no_grad():
            return [value for part in new.split(3) for value in net(part - centre).flatten().tolist()]

    def make(folder: pathlib.Path):
        net, centre = train()
        torch.save({"net": net.state_dict(), **({"centre": centre} if kept else {})}, folder / "rates.pt")
        return folder / "rates.pt"

    def resumed(path):
        net, state = fresh(), torch.load(path)
        net.load_state_dict(state["net"])
        return answers(net, state.get("centre", new.mean(0)))

    return SimpleNamespace(make=make, resumed=resumed, uninterrupted=lambda: answers(*train()))


def sick():
    return training(False)


def healthy():
    return training(True)
