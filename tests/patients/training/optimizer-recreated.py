"""The function that makes a step makes its own Adam, too: no step knows of the one before."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.training.loops import loaders, mse

CODE, WHERE, RUN = "training/optimizer-recreated", ["optimizer", "Adam"], True


def training(made_once):
    torch.manual_seed(35)
    x = torch.randn(800, 10)
    pair = loaders(x, torch.tanh(x @ torch.randn(10, 2) / 3).sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(10, 128), nn.Tanh(), nn.Linear(128, 1))
    first = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(batch):
        optimizer = first if made_once else torch.optim.Adam(model.parameters(), lr=1e-2)
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    def train(callback):
        for number, batch in enumerate(batch for _ in range(6) for batch in pair[0]):
            callback(number, step(batch))

    train_loader, val_loader = pair
    given = {"train_loader": train_loader, "val_loader": val_loader, "scheduler": None}
    return SimpleNamespace(model=model, optimizer=first, loss_fn=mse, train=train, **given)


def sick():
    return training(made_once=False)


def healthy():
    return training(made_once=True)
