"""The scores of a policy are drawn from as they are, without a softmax."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/not-probabilities", ("chances", "multinomial")


def training(normalizes):
    torch.manual_seed(0)
    policy, state = nn.Linear(4, 6), torch.randn(3, 4)

    def act():
        chances = policy(state)
        if normalizes:
            chances = chances.softmax(-1)
        return torch.multinomial(chances, 1)

    return SimpleNamespace(trigger=act)


def sick():
    return training(normalizes=False)


def healthy():
    return training(normalizes=True)
