"""Weights are drawn at the start of each pass, inside the loop."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders

CODE, WHERE = "training/weights-not-restored", ["init", "apply"]
RUN = True


def init(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)


def training(each_pass):
    torch.manual_seed(114)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5)).apply(init)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    pair = loaders(*clusters(1200))

    def train(callback):
        step = 0
        for _ in range(6):
            if each_pass:
                model.apply(init)
            with torch.no_grad():  # the largest weights are kept small: that is no new draw
                model[0].weight.clamp_(-0.5, 0.5)
            for batch in pair[0]:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                callback(step, loss.item())
                step += 1

    parts = {"loss_fn": cross_entropy, "train_loader": pair[0], "val_loader": pair[1], "scheduler": None}
    return SimpleNamespace(model=model, optimizer=optimizer, train=train, **parts)


def sick():
    return training(each_pass=True)


def healthy():
    return training(each_pass=False)
