"""The whole state is written beside the old one, which it then replaces, after each step."""

import os
import pathlib
import tempfile
from types import SimpleNamespace

import torch
from torch import nn

CODE, BOTTLENECK, LINE = "speed/checkpoint-too-often", "rest", "torch.save(model.state_dict(), new)"


def training(every):
    torch.manual_seed(2)
    folder = tempfile.TemporaryDirectory()
    path, model, steps = pathlib.Path(folder.name) / "last.pt", nn.Embedding(40_000, 32, sparse=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3])).square().mean().backward()
        optimizer.step()
        steps.append(1)
        if len(steps) % every == 0:
            new = path.with_suffix(".new")
            torch.save(model.state_dict(), new)
            os.replace(new, path)

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, folder=folder)


def sick():
    return training(every=1)


def healthy():
    return training(every=200)
