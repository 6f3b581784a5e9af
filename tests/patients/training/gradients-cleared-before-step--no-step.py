"""A counter that never comes to its number: backward each time, and no step. The healthy loop steps by hand."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/gradients-cleared-before-step", ["step"], True


def training(each):
    torch.manual_seed(62)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    ns = made(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, loaders(*clusters(400, classes=3)), 5)

    def train(callback):
        for number, batch in enumerate(batch for _ in range(5) for batch in ns.train_loader):
            loss = cross_entropy(model, batch)
            loss.backward()
            if number % each == each - 1:
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad)
                        p.grad = None
            callback(number, loss.item())

    ns.train = train
    return ns


def sick():
    return training(each=100)


def healthy():
    return training(each=1)
