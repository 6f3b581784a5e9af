"""A wind forecast predicts its own uncertainty, as a variance straight from a linear layer. A storm in the second
batch drives that variance below zero for one row, and the loss is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

CODE, PHASE, MODULE, OP, LINE = "nan/sqrt-of-negative", "forward", "spread", "sqrt", "variance.sqrt()"
SAMPLES, STEP = (6,), 1


class Spread(nn.Module):
    def __init__(self, columns, positive):
        super().__init__()
        self.raw = nn.Linear(columns, 1)
        self.positive = positive
        nn.init.constant_(self.raw.weight, -0.05)
        nn.init.constant_(self.raw.bias, 1.0)

    def forward(self, x):
        variance = self.raw(x)
        if self.positive:
            variance = F.softplus(variance) + 1e-6
        return variance.sqrt()


def training(positive):
    torch.manual_seed(2)
    model = nn.ModuleDict({"speed": nn.Linear(6, 1), "spread": Spread(6, positive)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    hours = torch.rand(3, 9, 6)
    hours[1, 6] += 8
    speeds = hours.mean(-1, keepdim=True)
    batches = iter(zip(hours, speeds, strict=True))

    def step():
        x, y = next(batches)
        std = model["spread"](x)
        loss = (((y - model["speed"](x)) / std).square() / 2 + std.log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(positive=False)


def healthy():
    return training(positive=True)
