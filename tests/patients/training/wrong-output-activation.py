"""An autoencoder of standardised readings ends in a sigmoid: half of what it has to give back is below zero."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/wrong-output-activation", ["decode", "sigmoid"]


def training(last):
    torch.manual_seed(66)
    readings = torch.randn(800, 3) @ torch.randn(3, 16)
    readings = (readings - readings.mean(0)) / readings.std(0)
    model = nn.Sequential()
    model.add_module("encode", nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)))
    model.add_module("decode", nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16), last))

    def loss_fn(model, batch):
        return F.l1_loss(model(batch[0]), batch[0])

    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, loaders(readings, readings[:, 0]), 6)


def sick():
    return training(nn.Sigmoid())


def healthy():
    return training(nn.Identity())
