"""Before each pass the samples are shuffled, and their labels stay where they were."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.training.loops import clusters

CODE, WHERE, RUN = "training/label-noise", ["target", "train"], True


def training(both):
    torch.manual_seed(84)
    x, y = clusters(192)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, int(y.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(callback):
        samples, labels = x, y
        for step in range(30):
            if step % 6 == 0:
                order = torch.randperm(len(samples))
                samples, labels = samples[order], labels[order] if both else labels
            rows = slice(32 * (step % 6), 32 * (step % 6) + 32)
            loss = nn.functional.cross_entropy(model(samples[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    parts = dict.fromkeys(("loss_fn", "train_loader", "val_loader", "scheduler"))
    return SimpleNamespace(model=model, optimizer=optimizer, train=train, **parts)


def sick():
    return training(both=False)


def healthy():
    return training(both=True)
