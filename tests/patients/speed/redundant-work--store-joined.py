"""Rows are joined to a store by torch.cat, which copies the whole store in each step."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader

CODE, BOTTLENECK, LINE = "speed/redundant-work", "forward", "store[0] = torch.cat((store[0], x.detach()))"


def training(table):
    torch.manual_seed(4)
    model = nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    store = [torch.randn(60_000, 64)]
    rows = torch.cat((store[0], torch.empty(4_000, 64)))
    count = 60_000

    def keep(x):
        nonlocal count
        if table:
            rows[count : count + len(x)] = x.detach()
        else:
            store[0] = torch.cat((store[0], x.detach()))
        count += len(x)
        return (rows if table else store[0])[torch.randint(count, (32,))]

    def step(x):
        optimizer.zero_grad()
        loss = model(torch.cat((x, keep(x)))).square().mean()
        loss.backward()
        optimizer.step()

    return SimpleNamespace(
        model=model, optimizer=optimizer, step=step, loader=DataLoader(torch.randn(80, 64), batch_size=8)
    )


def sick():
    return training(table=False)


def healthy():
    return training(table=True)
