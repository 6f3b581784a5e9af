"""A NaN was looked for a week ago; the search is still on in each step."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, BOTTLENECK, LINE = (
    "speed/debug-mode",
    "forward",
    "with torch.autograd.set_detect_anomaly(searching(number)):",
)


def training(searching):
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows, number = torch.randn(32, 24), 0

    def step():
        nonlocal number
        with torch.autograd.set_detect_anomaly(searching(number)):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        number += 1

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def sick():
    return training(searching=lambda number: True)


def healthy():
    return training(searching=lambda number: number == 3)
