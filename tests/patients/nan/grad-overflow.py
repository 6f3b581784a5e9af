"""House prices, all in float16. The error is summed over the batch: the sum of the errors still fits into float16,
the sum of the gradients over square feet does not.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/grad-overflow", "backward", "price", "addmm", "self.price(rooms)"
SAMPLES, STEP = None, 0


class Houses(nn.Module):
    def __init__(self):
        super().__init__()
        self.price = nn.Linear(3, 1)

    def forward(self, rooms):
        return self.price(rooms).squeeze(-1)


def training(reduction):
    torch.manual_seed(27)
    model = Houses().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    houses = torch.rand(64, 3) * torch.tensor([5.0, 3.0, 2500.0]) + torch.tensor([1.0, 1.0, 800.0])
    prices = 100 + houses[:, 2] / 10
    nn.init.constant_(model.price.weight, 0.01)
    error = nn.L1Loss(reduction=reduction)

    def step():
        loss = error(model(houses.half()), prices.half())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2)


def sick():
    return training(reduction="sum")


def healthy():
    return training(reduction="mean")
