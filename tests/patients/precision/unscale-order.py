"""The step clips gradients that still carry GradScaler's scale. It is taken out afterwards: next to nothing is left."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "precision/unscale-order", ["clip_grad_norm_"]


def training(unscale):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def loss_fn(model, batch):
        optimizer.zero_grad()
        loss = (model(batch).float() - 2).square().mean()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return SimpleNamespace(model=model, batch=torch.randn(8, 6), loss_fn=loss_fn, dtype="float16")


def sick():
    return training(unscale=False)


def healthy():
    return training(unscale=True)
