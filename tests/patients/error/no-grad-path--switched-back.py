"""A function gives scores with gradients off, and puts the mode back in a `finally`; the scores are then trained on."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/no-grad-path", ("scores", "set_grad_enabled", "ranked_for_a_look")


def ranked_for_a_look(model, rows):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    try:
        return model(rows).squeeze(-1)
    finally:
        torch.set_grad_enabled(before)


def ranked(model, rows):
    ranked_for_a_look(model, rows).argsort()
    return model(rows).squeeze(-1)


def training(rank):
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(6, 3)

    def trigger():
        scores = rank(model, rows)
        loss = torch.relu(1 - scores[:3] + scores[3:]).mean()
        loss.backward()

    return SimpleNamespace(trigger=trigger)


def sick():
    return training(ranked_for_a_look)


def healthy():
    return training(ranked)
