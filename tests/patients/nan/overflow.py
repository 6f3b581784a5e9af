"""Bicycle rentals are counted with a Poisson regression. Two rows of the second batch give their distance in metres,
the others in kilometres, and the loss is inf.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/overflow", "forward", "rate", "exp", "torch.exp(log_rate)"
SAMPLES, STEP = (2, 5), 1


class PoissonRate(nn.Module):
    def __init__(self, columns, limit):
        super().__init__()
        self.score = nn.Linear(columns, 1)
        self.limit = limit

    def forward(self, x):
        log_rate = self.score(x).squeeze(-1).clamp(max=self.limit)
        return torch.exp(log_rate), log_rate


def training(limit):
    torch.manual_seed(3)
    model = nn.ModuleDict({"rate": PoissonRate(4, limit)})
    nn.init.constant_(model["rate"].score.weight, 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    days = torch.rand(3, 8, 4)
    days[1, [2, 5], 3] *= 4000
    counts = torch.poisson(torch.full((3, 8), 2.0))
    batches = iter(zip(days, counts, strict=True))

    def step():
        x, count = next(batches)
        rate, log_rate = model["rate"](x)
        loss = (rate - count * log_rate).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(limit=float("inf"))


def healthy():
    return training(limit=8.0)
