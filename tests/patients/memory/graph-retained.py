"""A running mean of the loss for the progress bar is made from the loss itself, so that it drags every graph along."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/graph-retained", ["bar.mean", "mean"], "bar.mean = 0.9 *"


def training(cut):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(20, 160), nn.SiLU(), nn.Linear(160, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(300, 20)
    bar = SimpleNamespace(mean=0.0)

    def step():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.mean = 0.9 * bar.mean + 0.1 * (loss.item() if cut else loss)

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3, names={"bar": bar, "model": model})


def sick():
    return training(cut=False)


def healthy():
    return training(cut=True)
