"""An average of the model is made of its parameters alone: its batch normalization still has the first statistics."""

import copy

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/running-statistics", ["average", "buffers"], True


def training(buffers):
    torch.manual_seed(98)
    x, y = clusters(480, classes=4)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    average = copy.deepcopy(model).requires_grad_(False)
    parts = made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(3 * x + 20, y), 8)

    def train(callback):
        step = 0
        for _ in range(8):
            for batch in parts.train_loader:
                parts.optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                parts.optimizer.step()
                for kept, now in zip(average.parameters(), model.parameters()):
                    kept.data.mul_(0.9).add_(now.data, alpha=0.1)
                for kept, now in zip(average.buffers(), model.buffers()) if buffers else ():
                    kept.copy_(now)
                callback(step, loss.item())
                step += 1

    parts.train = train
    return parts


def sick():
    return training(buffers=False)


def healthy():
    return training(buffers=True)
