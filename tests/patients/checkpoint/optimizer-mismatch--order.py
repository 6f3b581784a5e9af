"""Two towers of one shape are given to the optimizer in another order than in the run that saved."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/optimizer-mismatch", ("people.weight", "places.weight")


def training(exchanged):
    rows = torch.randn(16, 5, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0] * 3 + [0.01] * 3)

    def fresh(exchanged=False):
        torch.manual_seed(0)
        net = nn.ModuleDict({"people": nn.Linear(3, 4, bias=False), "places": nn.Linear(3, 4, bias=False)})
        towers = list(net.values())
        groups = [{"params": tower.parameters()} for tower in (towers[::-1] if exchanged else towers)]
        return net, torch.optim.Adam(groups, lr=0.05)

    def train(net, optimizer, first, last):
        losses = []
        for batch in rows[first:last]:
            optimizer.zero_grad()
            loss = (net["people"](batch[:, :3]) - net["places"](batch[:, 3:]) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def make(folder: pathlib.Path):
        net, optimizer = fresh()
        train(net, optimizer, 0, 8)
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 8}, folder / "towers.pt")
        return folder / "towers.pt"

    def resumed(path):
        (net, optimizer), state = fresh(exchanged), torch.load(path)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        return train(net, optimizer, state["step"], 16)

    return SimpleNamespace(make=make, resumed=resumed, uninterrupted=lambda: train(*fresh(), 0, 16)[8:])


def sick():
    return training(True)


def healthy():
    return training(False)
