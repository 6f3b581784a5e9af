"""A policy whose bonus for being undecided is far more than it can earn: it stays so. The twin has a small bonus."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE, RUN = "training/over-regularized", ["loss_fn", "entropy"], True


def training(bonus):
    torch.manual_seed(97)
    patient = torch.randn(1200, 8)
    gain = torch.sigmoid(patient @ torch.randn(8, 4))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss_fn(model, batch):
        choice = model(batch[0]).log_softmax(1)
        earned = (choice.exp() * batch[1]).sum(1).mean()
        entropy = -(choice.exp() * choice).sum(1).mean()
        return -earned - bonus * entropy

    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, loaders(patient, gain), 8)


def sick():
    return training(bonus=3.0)


def healthy():
    return training(bonus=0.01)
