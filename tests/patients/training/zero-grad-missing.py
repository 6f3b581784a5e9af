"""A loop that was taken apart into functions lost its zero_grad on the way."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/zero-grad-missing", ["optimizer", "update"]


def training(clear):
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ns = made(model, optimizer, cross_entropy, loaders(*clusters(800, spread=2.0)), 2)

    def update(loss):
        if clear:
            model.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    def train(callback):
        step = 0
        for _ in range(6):
            for batch in ns.train_loader:
                loss = cross_entropy(model, batch)
                update(loss)
                callback(step, loss.item())
                step += 1

    ns.train = train
    return ns


def sick():
    return training(clear=False)


def healthy():
    return training(clear=True)
