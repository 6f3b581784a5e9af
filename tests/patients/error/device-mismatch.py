"""A model is moved (the meta device stands in for a card); the offsets that it keeps as an attribute stay behind."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/device-mismatch", ("offsets", "register_buffer", "network.1")


class Shifted(nn.Module):
    def __init__(self, kept):
        super().__init__()
        offsets = torch.linspace(0, 1, 6)
        if kept:
            self.register_buffer("offsets", offsets)
        else:
            self.offsets = offsets

    def forward(self, values):
        return values + self.offsets


def training(kept):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), Shifted(kept), nn.Linear(6, 2)).to("meta")
    values = torch.rand(3, 4, device="meta")

    def evaluate():
        return network(values)

    return SimpleNamespace(trigger=evaluate)


def sick():
    return training(kept=False)


def healthy():
    return training(kept=True)
