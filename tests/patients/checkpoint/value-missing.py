"""The loss is divided by a temperature that falls with each step: it is in no state dict."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/value-missing", ("run.pt", "self.temperature")


class Run:
    def __init__(self):
        torch.manual_seed(3)
        self.model, self.step, self.temperature = nn.Linear(4, 1), 0, 2.0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, last):
        data = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(0))
        losses = []
        for step in range(self.step, last):
            loss = ((self.model(data[step]) - 1) / self.temperature).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.temperature *= 0.9
            losses.append(loss.item())
        self.step = last
        return losses


def training(sick):
    def make(folder: pathlib.Path):
        run = Run()
        run.train(6)
        state = {"net": run.model.state_dict(), "step": run.step, "temperature": run.temperature}
        torch.save({"net": state["net"], "step": 6} if sick else state, folder / "run.pt")
        return folder / "run.pt"

    def resumed(path):
        run, state = Run(), torch.load(path)
        run.model.load_state_dict(state["net"])
        run.step, run.temperature = state["step"], state.get("temperature", 2.0)
        return run.train(16)

    return SimpleNamespace(make=make, resumed=resumed, uninterrupted=lambda: Run().train(16)[6:])


def sick():
    return training(True)


def healthy():
    return training(False)
