"""zero_grad stands where it looks right at a glance: behind backward. The optimizer steps on nothing."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/gradients-cleared-before-step", ["optimizer", "train"]


def training(first):
    torch.manual_seed(61)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ns = made(model, optimizer, cross_entropy, loaders(*clusters(800)), 1)

    def train(callback):
        step = 0
        for _ in range(6):
            for batch in ns.train_loader:
                loss = cross_entropy(model, batch)
                if first:
                    optimizer.zero_grad()
                loss.backward()
                if not first:
                    optimizer.zero_grad()
                optimizer.step()
                callback(step, loss.item())
                step += 1

    ns.train = train
    return ns


def sick():
    return training(first=False)


def healthy():
    return training(first=True)
