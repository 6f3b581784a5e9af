"""A model was cast to float16 as a whole, and Adam updates its float16 weights with an epsilon that is zero there."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "precision/epsilon-underflow", ["optimizer"]


def training(eps):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).half()

    def loss_fn(model, batch):
        return model(batch).float().square().mean() + 0.1

    return SimpleNamespace(
        model=model,
        batch=torch.randn(8, 4),
        loss_fn=loss_fn,
        dtype="float16",
        optimizer=torch.optim.Adam(model.parameters(), eps=eps),
    )


def sick():
    return training(eps=1e-8)


def healthy():
    return training(eps=1e-4)
