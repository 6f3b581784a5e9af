"""A model whose activation is a lambda is saved whole."""

import io
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/not-picklable", ("painter", "act")


def training(plain):
    painter = nn.Linear(3, 2)
    painter.act = torch.relu if plain else lambda x: x.clamp_min(0)

    def keep():
        torch.save(painter, io.BytesIO())

    return SimpleNamespace(trigger=keep)


def sick():
    return training(plain=False)


def healthy():
    return training(plain=True)
