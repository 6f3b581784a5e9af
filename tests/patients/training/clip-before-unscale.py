"""Gradients are clipped by value, before the scaler has taken its scale out of them."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/clip-before-unscale", ["unscale_"]


def training(unscale):
    torch.manual_seed(43)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    ns = made(model, optimizer, cross_entropy, loaders(*clusters(800)), 1)

    def train(callback):
        step = 0
        for _ in range(6):
            for batch in ns.train_loader:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                callback(step, loss.item())
                step += 1

    ns.train = train
    return ns


def sick():
    return training(unscale=False)


def healthy():
    return training(unscale=True)
