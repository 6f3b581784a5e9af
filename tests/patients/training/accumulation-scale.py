"""Eight batches to a step, and a loss that is divided by two."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders

CODE, WHERE = "training/accumulation-scale", ["loss", "backward"]
RUN = True


def training(divisor, rate=0.1, every=8):
    torch.manual_seed(112)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    pair = loaders(*clusters(1700, spread=2.0), batch=16)

    def train(callback):
        step = 0
        for _ in range(6):
            optimizer.zero_grad()
            for i, batch in enumerate(pair[0]):
                loss = cross_entropy(model, batch)
                (loss / divisor).backward()
                if (i + 1) % every == 0 or i + 1 == len(pair[0]):
                    optimizer.step()
                    optimizer.zero_grad()
                    callback(step, loss.item())
                    step += 1

    parts = {"loss_fn": cross_entropy, "train_loader": pair[0], "val_loader": pair[1], "scheduler": None}
    return SimpleNamespace(model=model, optimizer=optimizer, train=train, **parts)


def sick():
    return training(divisor=2)


def healthy():
    return training(divisor=8)
