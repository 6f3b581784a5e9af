"""The trunk is frozen when the optimizer is made of what is trained, and unfrozen in the third epoch."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE, RUN = "training/parameters-not-in-optimizer", ["trunk"], True


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.trunk(x))


def training(late):
    torch.manual_seed(63)
    model = Tuned()
    model.trunk.requires_grad_(False)
    weights = model.parameters() if late else filter(lambda p: p.requires_grad, model.parameters())
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    x = torch.randn(600, 12)
    data = made(model, optimizer, cross_entropy, loaders(x, (x[:, 0] * x[:, 1]).sign().long() + 1), 0)

    def train(callback):
        for number in range(8 * 15):
            if number == 2 * 15:
                model.trunk.requires_grad_(True)
            if number % 15 == 0:
                batches = iter(data.train_loader)
            optimizer.zero_grad()
            loss = cross_entropy(model, next(batches))
            loss.backward()
            optimizer.step()
            callback(number, loss.item())

    data.train = train
    return data


def sick():
    return training(late=False)


def healthy():
    return training(late=True)
