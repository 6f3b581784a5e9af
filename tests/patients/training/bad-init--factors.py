"""Both factors of each adapter begin as zeros, in order to leave a network as it is: neither ever gets a gradient."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/bad-init", ["narrow", "wide"]


class WithAdapter(nn.Module):
    def __init__(self, layer, both):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.narrow, self.wide = nn.Linear(layer.in_features, 3, bias=False), nn.Linear(3, layer.out_features)
        for part in (self.narrow, self.wide) if both else (self.wide,):
            nn.init.zeros_(part.weight)
        nn.init.zeros_(self.wide.bias)

    def forward(self, x):
        return self.layer(x) + self.wide(torch.tanh(self.narrow(x)))


def training(both):
    torch.manual_seed(31)
    x, y = clusters(480, classes=4)
    model = nn.Sequential(
        WithAdapter(nn.Linear(12, 20), both), nn.ReLU(), WithAdapter(nn.Linear(20, 20), both), nn.ReLU()
    ).append(nn.Linear(20, 4))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return made(model, optimizer, cross_entropy, loaders(x, y), 6)


def sick():
    return training(both=True)


def healthy():
    return training(both=False)
