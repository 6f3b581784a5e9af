"""Sales are compared on a log scale. Two shops were closed in the second week and sold nothing, and the log of their
label is -inf.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/label-out-of-range", "forward", "", "log", "torch.log(sold + offset)"
SAMPLES, STEP = (1, 8), 1


def training(offset):
    torch.manual_seed(43)
    model = nn.Sequential(nn.Linear(6, 10), nn.ELU(), nn.Linear(10, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    shops = torch.randn(3, 10, 6)
    sales = torch.randint(3, 90, (3, 10)).float()
    sales[1, [1, 8]] = 0
    weeks = iter(zip(shops, sales, strict=True))

    def step():
        shop, sold = next(weeks)
        log_forecast = model(shop).squeeze(-1)
        loss = (log_forecast - torch.log(sold + offset)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(offset=0.0)


def healthy():
    return training(offset=1.0)
