"""All but the normalisation was frozen, by a name that matched too much; the optimizer was given everything."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/frozen-parameters", ["layers", "head"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 2)

    def forward(self, x):
        return self.head(self.layers(x))


def training(match):
    torch.manual_seed(58)
    x = torch.randn(1200, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in match))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, y), 10)


def sick():
    return training(match=["layers.0", "layers.3", "head"])


def healthy():
    return training(match=[])
