"""Attention whose softmax runs over the heads. Beside it, soft clusters whose shares sum to 1 for each place, as they
are meant to."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/wrong-softmax-dim", ["forward", "softmax"]


class Words(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.words, self.places, self.dim = nn.Embedding(20, 32), nn.Embedding(12, 32), dim
        self.mix, self.join, self.clusters = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 3)
        self.out = nn.Linear(96, 4)

    def forward(self, x):
        h = self.words(x) + self.places.weight
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.mix(h).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(self.dim)
        h = h + self.join((weights @ v).transpose(1, 2).flatten(2))
        shares = self.clusters(h).transpose(1, 2).softmax(1)  # of each place, over the clusters
        return self.out((shares @ h).flatten(1))


def training(dim):
    torch.manual_seed(105)
    x = torch.randint(0, 20, (900, 12))
    y = torch.stack([(x % 4 == c).sum(1) for c in range(4)], 1).argmax(1)
    model = Words(dim)
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, loaders(x, y), 8)


def sick():
    return training(dim=1)


def healthy():
    return training(dim=-1)
