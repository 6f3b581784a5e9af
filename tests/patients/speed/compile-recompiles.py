"""The loss has a weight that falls in every step, given to the compiled function as a number."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, BOTTLENECK, LINE = "speed/compile-recompiles", "forward", "loss = compiled(x, weight)"


def training(as_tensor):
    torch.manual_seed(8)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(lambda x, weight: model(x).square().mean() * weight, backend="eager", dynamic=False)
    x, steps = torch.randn(16, 8), []

    def step():
        steps.append(1)
        weight = torch.tensor(1 / len(steps)) if as_tensor else 1 / len(steps)
        loss = compiled(x, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def sick():
    return training(as_tensor=False)


def healthy():
    return training(as_tensor=True)
