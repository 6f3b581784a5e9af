"""A table of distances that never changes is filled item by item in each forward."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader

CODE, BOTTLENECK, LINE = "speed/redundant-work", "forward", "table = distances(x.shape[1])"


def training(once):
    torch.manual_seed(4)
    scale = 0.1

    def distances(length):
        table = torch.zeros(length, length)
        for i in range(length):
            for j in range(length):
                if abs(i - j) < 8:
                    table[i, j] = scale * abs(i - j)
        return table

    model = nn.Linear(8, 8)
    known = distances(64)

    def scores(x):
        if once:
            table = known
        else:
            table = distances(x.shape[1])
        return model(x) @ x.transpose(1, 2) - table

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        loss = scores(x).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()

    return SimpleNamespace(
        model=model, optimizer=optimizer, step=step, loader=DataLoader(torch.randn(80, 64, 8), batch_size=8)
    )


def sick():
    return training(once=False)


def healthy():
    return training(once=True)
