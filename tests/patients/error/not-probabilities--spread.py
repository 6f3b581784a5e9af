"""The spread of a normal distribution is what a layer gives, of either sign."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Normal

CODE, NAMES = "error/not-probabilities", ("spread", "softplus")


def training(positive):
    torch.manual_seed(0)
    policy, states = nn.Linear(3, 2), torch.randn(12, 3)

    def trigger():
        mean, spread = policy(states).unbind(1)
        actions = Normal(mean, positive(spread), validate_args=True)
        actions.rsample().sum().backward()

    return SimpleNamespace(trigger=trigger)


def of_any_sign():
    torch.manual_seed(0)
    policy, states = nn.Linear(3, 2), torch.randn(12, 3)

    def trigger():
        mean, spread = policy(states).unbind(1)
        actions = Normal(mean, scale=spread, validate_args=True)
        actions.rsample().sum().backward()

    return SimpleNamespace(trigger=trigger)


def sick():
    return of_any_sign()


def healthy():
    return training(nn.functional.softplus)
