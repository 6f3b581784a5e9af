"""Deterministic algorithms, which also fill the memory that the step is about to write over."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader

CODE, BOTTLENECK, LINE = "speed/debug-mode", "forward", "torch.use_deterministic_algorithms(True)"


def training(fixed):
    torch.manual_seed(8)
    torch.use_deterministic_algorithms(False)
    if not fixed:
        torch.use_deterministic_algorithms(True)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        table = torch.empty(3_000_000)
        table[: len(x)] = model(x).square().mean(1).detach()
        model(x).square().mean().backward()
        optimizer.step()

    return SimpleNamespace(
        model=model, optimizer=optimizer, step=step, proven=True, loader=DataLoader(torch.randn(160, 16), batch_size=16)
    )


def sick():
    return training(fixed=False)


def healthy():
    return training(fixed=True)
