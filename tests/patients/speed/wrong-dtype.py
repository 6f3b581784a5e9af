"""The features come from NumPy, and the model was cast to agree with them."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

CODE, BOTTLENECK, LINE = "speed/wrong-dtype", "forward", "model = model.double()"


def training(wide):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    x = torch.from_numpy(np.random.default_rng(5).random((64, 64)))
    if wide:
        model = model.double()
    else:
        x = x.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, x=x)


def sick():
    return training(wide=True)


def healthy():
    return training(wide=False)
