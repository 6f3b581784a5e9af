"""A song may have several moods; one softmax makes them share a sum of one."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/wrong-output-activation", ["softmax", "forward"]


class Moods(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.layers, self.shared = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 7)), shared

    def forward(self, song):
        scores = self.layers(song)
        return F.softmax(scores, dim=-1) if self.shared else torch.sigmoid(scores)


def training(shared):
    torch.manual_seed(84)
    songs = torch.randn(600, 9)
    moods = (songs @ torch.randn(9, 7) > 0.5).float()
    model = Moods(shared)

    def loss_fn(model, batch):
        return F.binary_cross_entropy(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(songs, moods), 6)


def sick():
    return training(shared=True)


def healthy():
    return training(shared=False)
