"""The optimizer's step stands one level too far out: once a pass, with the gradient of the last batch alone."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/gradients-cleared-before-step", ["step", "optimizer"], True


def training(inside):
    torch.manual_seed(61)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    ns = made(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, loaders(*clusters(500, classes=3)), 4)

    def train(callback):
        for number in range(4 * len(ns.train_loader)):
            if number % len(ns.train_loader) == 0:
                batches = iter(ns.train_loader)
            ns.optimizer.zero_grad()
            loss = cross_entropy(model, next(batches))
            loss.backward()
            if inside or (number + 1) % len(ns.train_loader) == 0:
                ns.optimizer.step()
            callback(number, loss.item())

    ns.train = train
    return ns


def sick():
    return training(inside=False)


def healthy():
    return training(inside=True)
