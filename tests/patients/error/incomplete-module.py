"""The layers are in a ModuleList, which is called as if it were a Sequential."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/incomplete-module", ("steps", "ModuleList")


class Encoder(nn.Module):
    def __init__(self, runs):
        super().__init__()
        layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)]
        if runs:
            self.steps = nn.Sequential(*layers)
        else:
            self.steps = nn.ModuleList(layers)

    def forward(self, rows):
        return self.steps(rows)


def training(runs):
    encoder, rows = Encoder(runs), torch.rand(3, 5)
    return SimpleNamespace(trigger=lambda: encoder(rows))


def sick():
    return training(runs=False)


def healthy():
    return training(runs=True)
