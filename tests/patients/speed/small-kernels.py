"""Each row of the batch is normalised and scored by itself."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, BOTTLENECK, LINE = "speed/small-kernels", "forward", "for row in rows:"


def training(one_by_one):
    torch.manual_seed(6)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(40, 10)

    def scores():
        if not one_by_one:
            return (model((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True))).sigmoid()
        each = []
        for row in rows:
            each.append(model((row - row.mean()) / row.std()).sigmoid())
        return torch.stack(each)

    def step():
        optimizer.zero_grad()
        scores().mean().backward()
        optimizer.step()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def sick():
    return training(one_by_one=True)


def healthy():
    return training(one_by_one=False)
