"""The largest weight of each layer goes into a log as a number, one after the other."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, BOTTLENECK, LINE = "speed/host-sync", "sync", "log.append(parameter.abs().max().item())"


def training(numbers):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, log = torch.randn(16, 12), []

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            if numbers:
                log.append(parameter.abs().max().item())
            else:
                log.append(parameter.detach().abs().max())

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def sick():
    return training(numbers=True)


def healthy():
    return training(numbers=False)
