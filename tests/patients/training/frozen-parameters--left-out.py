"""Adapters were frozen with the encoder, and the optimizer was given what is left."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/frozen-parameters", ["adapter"]


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 32)
        self.adapter = nn.Sequential(nn.Linear(32, 6), nn.GELU(), nn.Linear(6, 32))
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        hidden = torch.tanh(self.encoder(x))
        return self.head(hidden + self.adapter(hidden))


def training(frozen):
    torch.manual_seed(91)
    x = torch.randn(600, 8)
    label = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    model = Tuned()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("head") or not frozen and "adapter" in name)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return made(model, optimizer, cross_entropy, loaders(x, label), 6)


def sick():
    return training(frozen=True)


def healthy():
    return training(frozen=False)
