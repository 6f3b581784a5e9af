"""A recurrent layer gives its output together with its state; the pair goes into the head as it is."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/not-a-tensor", ("states", "head", "tuple", "GRU")


class Reader(nn.Module):
    def __init__(self, unpacks):
        super().__init__()
        self.words, self.head, self.unpacks = nn.GRU(6, 10, batch_first=True), nn.Linear(10, 3), unpacks

    def forward(self, letters):
        states = self.words(letters)
        if self.unpacks:
            states, _ = states
        return self.head(states)


def training(unpacks):
    torch.manual_seed(0)
    reader, letters = Reader(unpacks), torch.rand(4, 7, 6)
    return SimpleNamespace(trigger=lambda: reader(letters))


def sick():
    return training(unpacks=False)


def healthy():
    return training(unpacks=True)
