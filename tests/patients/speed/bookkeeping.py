"""A histogram of all weights in each step, for a figure that is looked at once an hour."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader

CODE, BOTTLENECK, LINE = "speed/bookkeeping", "rest", "history.append(sorted(weights.tolist())[::100])"


def training(every):
    torch.manual_seed(7)
    model, history, done = nn.Sequential(nn.Linear(16, 4096), nn.Linear(4096, 16)), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        done.append(1)
        if len(done) % every == 0:
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            history.append(sorted(weights.tolist())[::100])

    return SimpleNamespace(
        model=model, optimizer=optimizer, step=step, proven=True, loader=DataLoader(torch.randn(160, 16), batch_size=16)
    )


def sick():
    return training(every=1)


def healthy():
    return training(every=200)
