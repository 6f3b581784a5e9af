"""The mask is a plain attribute first, and is then to be a buffer of the same name."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/unusable-name", ("past", "Causal")


class Causal(nn.Module):
    def __init__(self, plain):
        super().__init__()
        if plain:
            self.past = None
        self.register_buffer("past", torch.ones(3, 3).tril())

    def forward(self, rows):
        return self.past @ rows


def training(plain):
    return SimpleNamespace(trigger=lambda: Causal(plain)(torch.rand(3, 2)))


def sick():
    return training(plain=True)


def healthy():
    return training(plain=False)
