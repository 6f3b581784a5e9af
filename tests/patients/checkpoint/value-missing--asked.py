"""The best score is not in the file; the loading asks for it, and begins with the worst one where it is not there."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/value-missing", ("best", "asks for")


def training(complete: bool) -> SimpleNamespace:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    scores = [0.4, 0.7, 0.6, 0.5, 0.65, 0.55]

    def epochs(model, optimizer, numbers, best):
        chosen = []
        for epoch in numbers:
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scores[epoch] > best:
                best = scores[epoch]
                chosen.append(epoch)
        return best, chosen

    def fresh():
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    def resumed(path):
        model, optimizer = fresh()
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return epochs(model, optimizer, range(state["epoch"], 6), state.get("best", 0.0))[1]

    def uninterrupted():
        model, optimizer = fresh()
        best, _ = epochs(model, optimizer, range(3), 0.0)
        return epochs(model, optimizer, range(3, 6), best)[1]

    def make(folder: pathlib.Path):
        model, optimizer = fresh()
        best, _ = epochs(model, optimizer, range(3), 0.0)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        torch.save({**state, "best": best} if complete else state, folder / "last.pt")
        return folder / "last.pt"

    return SimpleNamespace(make=make, resumed=resumed, uninterrupted=uninterrupted)


def sick():
    return training(False)


def healthy():
    return training(True)
