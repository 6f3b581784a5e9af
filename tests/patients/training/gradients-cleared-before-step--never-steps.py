"""Encoder and head have an optimizer each, and that of the encoder is never stepped."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/gradients-cleared-before-step", ["for_encoder", "step"], True


def training(both):
    torch.manual_seed(62)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    for_encoder, for_head = (torch.optim.Adam(model[i].parameters(), lr=3e-3) for i in (0, 2))
    ns = made(model, [for_encoder, for_head], cross_entropy, loaders(*clusters(400, classes=3)), 5)

    def train(callback):
        for number, batch in enumerate(batch for _ in range(5) for batch in ns.train_loader):
            for_encoder.zero_grad()
            for_head.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            if both:
                for_encoder.step()
            for_head.step()
            callback(number, loss.item())

    ns.train = train
    return ns


def sick():
    return training(both=False)


def healthy():
    return training(both=True)
