"""Fuel consumption is learnt with plain gradient descent and a generous learning rate. Each loss is more than a
hundred times the one before it; after sixteen of them it is inf.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/lr-divergence", "optimizer", None, None, "optimizer.step()"
SAMPLES, STEP = None, 16


def training(lr):
    torch.manual_seed(31)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    cars = torch.rand(40, 5) * 3
    litres = 4 + cars.sum(-1, keepdim=True)

    def step():
        loss = nn.functional.mse_loss(model(cars), litres)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=20)


def sick():
    return training(lr=0.5)


def healthy():
    return training(lr=1e-2)
