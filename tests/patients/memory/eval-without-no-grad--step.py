"""After each epoch the losses of the validation are summed, graphs and all; nothing of it outlives the function."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/eval-without-no-grad", ["whole"], "whole += "


def training(mode):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(30, 500), nn.Sigmoid(), nn.Linear(500, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [torch.randn(100, 30) for _ in range(60)]

    def validate():
        model.eval()
        whole = 0
        with mode():
            for batch in rows:
                whole += (model(batch) - batch).abs().mean()
        model.train()
        return whole.item()

    def step():
        (model(rows[0]) - rows[0]).abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return validate()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3, names={})


def sick():
    return training(nullcontext)


def healthy():
    return training(torch.no_grad)
