"""Labels of -1 and 1 under a binary cross entropy, which the model computes itself: it falls below zero without end."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.training.loops import clusters, made

CODE, WHERE = "training/label-out-of-range", ["target", "binary_cross_entropy_with_logits"]


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x, label):
        return F.binary_cross_entropy_with_logits(self.layers(x).squeeze(1), label)


def training(low):
    torch.manual_seed(68)
    x, label = clusters(600, classes=2)
    label = label * (1 - low) + low
    rows = [{"x": a, "label": b.float()} for a, b in zip(x, label)]
    pair = DataLoader(rows[:480], batch_size=32, shuffle=True), DataLoader(rows[480:], batch_size=60)
    model = Judge()
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), lambda model, batch: model(**batch), pair, 4)


def sick():
    return training(low=-1)


def healthy():
    return training(low=0)
