"""Sixteen batches to a step, at the rate that was right for one of the same size: the loss is not divided."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders

CODE, WHERE = "training/accumulation-scale", ["loss", "backward"]
RUN = True


def training(divisor, every=16):
    torch.manual_seed(113)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    pair = loaders(*clusters(1700, spread=2.0), batch=8)

    def train(callback):
        step = 0
        for _ in range(6):
            for i, batch in enumerate(pair[0]):
                loss = cross_entropy(model, batch) / divisor
                loss.backward()
                if (i + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    callback(step, loss.item() * divisor)
                    step += 1

    parts = {"loss_fn": cross_entropy, "train_loader": pair[0], "val_loader": pair[1], "scheduler": None}
    return SimpleNamespace(model=model, optimizer=optimizer, train=train, **parts)


def sick():
    return training(divisor=1)


def healthy():
    return training(divisor=16)
