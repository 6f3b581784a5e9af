"""Learned positions are added along the batch: a token has none, and the answer depends on the row."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/batch-mixing", ["forward"]


class Tokens(nn.Module):
    def __init__(self, along):
        super().__init__()
        self.embed, self.out, self.along = nn.Embedding(8, 16), nn.Linear(16, 2), along
        self.position, self.inner = nn.Parameter(torch.randn(64, 16)), nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        place = self.position[: x.size(self.along)]
        x = x + (place.unsqueeze(1) if self.along == 0 else place)
        return self.out(self.inner(x).relu().mean(1))


def training(along):
    torch.manual_seed(64)
    tokens = torch.randint(0, 8, (600, 6))
    model = Tokens(along)
    y = (tokens[:, :3].sum(1) > tokens[:, 3:].sum(1)).long()
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(tokens, y), 4)


def sick():
    return training(along=0)


def healthy():
    return training(along=1)
