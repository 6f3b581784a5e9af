"""The gate of a small recurrent cell is sharpened in place, after a sigmoid that needs its own result."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/inplace-modified", ("gate", "gate.pow_(2)", "sigmoid")


class Cell(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.both = nn.Linear(7, 8)
        self.in_place = in_place

    def forward(self, x, state):
        gate, new = self.both(torch.cat((x, state), -1)).chunk(2, -1)
        gate = torch.sigmoid(gate)
        if self.in_place:
            gate.pow_(2)
        else:
            gate = gate.pow(2)
        return gate * state + (1 - gate) * new.tanh()


class Reader(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.cell, self.head = Cell(in_place), nn.Linear(4, 1)

    def forward(self, series):
        state = torch.zeros(len(series), 4)
        for moment in series.unbind(1):
            state = self.cell(moment, state)
        return self.head(state)


def training(in_place):
    torch.manual_seed(0)
    reader, series = Reader(in_place), torch.rand(2, 5, 3)
    return SimpleNamespace(trigger=lambda: reader(series).sum().backward())


def sick():
    return training(in_place=True)


def healthy():
    return training(in_place=False)
