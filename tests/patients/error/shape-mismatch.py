"""A network for letters of 24 pixels is given scans of 36: the Linear behind the flattening was made for 24."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/shape-mismatch", ("reader.4", "scans")


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(600, 26))

    def forward(self, scans):
        return self.reader(scans)


def attempt(side):
    torch.manual_seed(0)
    model, scans = Letters(), torch.rand(3, 1, side, side)
    return SimpleNamespace(trigger=lambda: model(scans))


def sick():
    return attempt(36)


def healthy():
    return attempt(24)
