"""Observations are scaled by running statistics. One batch has a single observation, whose spread is not defined;
that step is still fine, the next loss is NaN, and every one after it.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE = "nan/running-stats-nonfinite", "forward", "scale"
OP, LINE = "std", "x.std(0, correction=self.correction)"
SAMPLES, STEP = None, 3


class RunningScale(nn.Module):
    def __init__(self, width, correction):
        super().__init__()
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        self.correction = correction

    def forward(self, x):
        scaled = (x - self.center) / (self.spread + 1e-5)
        with torch.no_grad():
            self.center.lerp_(x.mean(0), 0.05)
            self.spread.lerp_(x.std(0, correction=self.correction), 0.05)
        return scaled


class Critic(nn.Module):
    def __init__(self, correction):
        super().__init__()
        self.scale = RunningScale(4, correction)
        self.value = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.value(self.scale(x))


def training(correction):
    torch.manual_seed(47)
    model = Critic(correction)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    episodes = iter([torch.randn(length, 4) for length in (9, 6, 1, 8, 7)])

    def step():
        x = next(episodes)
        loss = nn.functional.mse_loss(model(x), x.sum(-1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=5)


def sick():
    return training(correction=1)


def healthy():
    return training(correction=0)
