"""What an encoder returns is a dict of two tensors, which is unpacked: that gives its keys."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/unpack-mismatch", ("spread", "values")


class Encoder(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.whole, self.both = whole, nn.Linear(3, 4)

    def forward(self, rows):
        centre, spread = self.both(rows).chunk(2, 1)
        if self.whole:
            return {"centre": centre, "log_variance": spread}
        return centre, spread


def training(whole):
    encoder, head, rows = Encoder(whole), nn.Linear(2, 1), torch.rand(5, 3)

    def total():
        centre, spread = encoder(rows)
        return head(spread).sum() + centre.sum()

    return SimpleNamespace(trigger=total)


def sick():
    return training(whole=True)


def healthy():
    return training(whole=False)
