"""Averaged weights are put into the model for the validation, and the model's own are not put back."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/weights-not-restored", ["validate", "evaluation"]


def training(restore):
    torch.manual_seed(76)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ns = made(model, optimizer, cross_entropy, loaders(*clusters(600)), 5)
    average = [p.detach().clone() for p in model.parameters()]

    def put(values):
        for p, value in zip(model.parameters(), values):
            p.data.copy_(value)

    def validate():
        own = [p.detach().clone() for p in model.parameters()]
        put(average)
        with torch.no_grad():
            for batch in ns.val_loader:
                cross_entropy(model, batch)
        if restore:
            put(own)

    def train(callback):
        step = 0
        for _ in range(5):
            for batch in ns.train_loader:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                for value, p in zip(average, model.parameters()):
                    value.lerp_(p.detach(), 0.002)
                callback(step, loss.item())
                step += 1
            validate()

    ns.train = train
    return ns


def sick():
    return training(restore=False)


def healthy():
    return training(restore=True)
