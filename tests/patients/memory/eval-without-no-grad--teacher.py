"""A student learns from a larger net's features. The larger one is in eval mode and in no optimizer, and yet its graph
is recorded and its weights get gradients."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/eval-without-no-grad", ["large"], "wanted = large(x)"


def training(context):
    torch.manual_seed(3)
    large = nn.Sequential(nn.Linear(40, 900), nn.GELU(), nn.Linear(900, 900), nn.GELU(), nn.Linear(900, 16)).eval()
    small = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 16))
    optimizer = torch.optim.AdamW(small.parameters())

    def step():
        x = torch.randn(400, 40)
        with context():
            wanted = large(x)
        loss = (small(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return SimpleNamespace(model=small, optimizer=optimizer, step=step, steps=3, names={"large": large})


def sick():
    return training(nullcontext)


def healthy():
    return training(torch.no_grad)
