"""A denoiser for raw photographs ends with gamma correction. After the dark frame is subtracted one photograph has
pixels a little below zero; the fractional power of those is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/pow-domain", "forward", "gamma", "pow", "light.pow(1 / 2.2)"
SAMPLES, STEP = (1,), 1


class Gamma(nn.Module):
    def __init__(self, floor):
        super().__init__()
        self.floor = floor

    def forward(self, light):
        light = light.clamp(min=self.floor)
        return light.pow(1 / 2.2)


class Denoiser(nn.Module):
    def __init__(self, floor):
        super().__init__()
        self.smooth = nn.Conv2d(1, 1, 3, padding=1, bias=False)
        self.gamma = Gamma(floor)
        nn.init.constant_(self.smooth.weight, 1 / 9)

    def forward(self, raw):
        return self.gamma(self.smooth(raw))


def training(floor):
    torch.manual_seed(8)
    model = Denoiser(floor)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clean = torch.rand(3, 4, 1, 10, 10) * 0.8 + 0.2
    raw = clean.clone()
    raw[1, 1, 0, 3:7, 3:7] = -0.004
    batches = iter(zip(raw, clean, strict=True))

    def step():
        noisy, photo = next(batches)
        loss = nn.functional.l1_loss(model(noisy), photo ** (1 / 2.2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(floor=float("-inf"))


def healthy():
    return training(floor=1e-4)
