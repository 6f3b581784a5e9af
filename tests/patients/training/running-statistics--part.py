"""A network and its slow average are parts of one model, which answers with the average in eval mode: its batch
normalization keeps the first statistics."""

import copy

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/running-statistics", ["model.slow", "buffers"], True


class WithSlow(nn.Module):
    def __init__(self, fast):
        super().__init__()
        self.fast, self.slow = fast, copy.deepcopy(fast)

    def forward(self, x):
        return (self.fast if self.training else self.slow)(x)


def training(buffers):
    torch.manual_seed(98)
    x, y = clusters(480, classes=4)
    model = WithSlow(nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4)))
    parts = made(model, torch.optim.Adam(model.fast.parameters(), lr=5e-3), cross_entropy, loaders(3 * x + 20, y), 8)

    def train(callback):
        step = 0
        for _ in range(8):
            model.train()
            for batch in parts.train_loader:
                parts.optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                parts.optimizer.step()
                now = model.fast.state_dict()
                for name, kept in model.slow.state_dict().items():
                    if kept.is_floating_point() and (buffers or "running" not in name):
                        kept.lerp_(now[name], 0.1)
                callback(step, loss.item())
                step += 1

    parts.train = train
    return parts


def sick():
    return training(buffers=False)


def healthy():
    return training(buffers=True)
