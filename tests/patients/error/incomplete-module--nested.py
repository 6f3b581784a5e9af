"""A `forward` whose indentation makes it a local function of the method before it."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/incomplete-module", ("Tower", "_levels")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))


class Tower(Base):
    def _levels(self, rows):
        for level in self.levels:
            rows = level(rows).relu()
        self.last = rows

        def forward(self, rows):
            self._levels(rows)
            return self.last.mean(1)


class Mended(Base):
    def forward(self, rows):
        return self.levels[0](rows).mean(1)


def training(tower):
    return SimpleNamespace(trigger=lambda: tower(torch.ones(4, 6)).sum().backward())


def sick():
    return training(Tower())


def healthy():
    return training(Mended())
