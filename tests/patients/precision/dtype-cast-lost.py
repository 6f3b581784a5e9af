"""Days since an epoch go through a model in bfloat16: of 19,876 and 19,877 it makes one number."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "precision/dtype-cast-lost", ["calendar"]


class Calendar(nn.Module):
    def __init__(self, reduced):
        super().__init__()
        self.reduced = reduced
        self.register_buffer("rate", torch.tensor(2 * torch.pi / 7))

    def forward(self, days):
        week = days % 7 if self.reduced else days
        angle = week.to(self.rate.dtype) * self.rate
        return torch.stack([angle.sin(), angle.cos()], -1)


class Sales(nn.Module):
    def __init__(self, reduced):
        super().__init__()
        self.calendar, self.out = Calendar(reduced), nn.Linear(2, 1)
        with torch.no_grad():
            self.out.weight.copy_(torch.tensor([[2.0, -1.0]]))
            self.out.bias.zero_()

    def forward(self, days):
        return self.out(self.calendar(days))


def training(reduced):
    days = torch.arange(19000, 19128)
    angle = (days % 7) * (2 * torch.pi / 7)
    sold = 2 * angle.sin() - angle.cos()

    def loss_fn(model, batch):
        return (model(batch[0]).float()[:, 0] - batch[1]).square().mean() + 0.2

    return SimpleNamespace(model=Sales(reduced), batch=(days, sold), loss_fn=loss_fn, dtype="bfloat16")


def sick():
    return training(reduced=False)


def healthy():
    return training(reduced=True)
