"""Noise is drawn from a generator of the user's own, which no snapshot knows. Once it is exactly zero, and the step
fails; run again, the generator has moved on, and the same step is finite. The twin keeps its noise away from zero.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/not-located", None, None, None, None
SAMPLES, STEP = None, 3


class Noise:
    """A source of random numbers that torch does not know. Its fourth number is 0."""

    def __init__(self, least):
        self.least, self.numbers = least, iter([0.4, 0.7, 0.2] + [0.0] + [0.5] * 20)

    def __call__(self):
        return max(next(self.numbers), self.least)


class Dimmer(nn.Module):
    """An image, made darker by chance."""

    def __init__(self, noise):
        super().__init__()
        self.noise, self.head = noise, nn.Linear(5, 1)

    def forward(self, image):
        return self.head(torch.log(image * self.noise()))


def training(least):
    torch.manual_seed(61)
    model = Dimmer(Noise(least))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    images, ages = torch.rand(6, 8, 5) + 0.5, torch.randn(6, 8, 1)
    batches = iter(zip(images, ages, strict=True))

    def step():
        image, age = next(batches)
        loss = nn.functional.mse_loss(model(image), age)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=6)


def sick():
    return training(least=0.0)


def healthy():
    return training(least=0.1)
