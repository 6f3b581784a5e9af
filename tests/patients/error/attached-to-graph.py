"""Predictions are collected for a score in NumPy while the graph is still on."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/attached-to-graph", ("heights", "detach")


def training(graph):
    torch.manual_seed(0)
    model, trees = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), torch.rand(9, 5)

    def score():
        with torch.set_grad_enabled(graph):
            heights = model(trees)
        return heights.numpy().mean()

    return SimpleNamespace(trigger=score)


def sick():
    return training(graph=True)


def healthy():
    return training(graph=False)
