"""Attention by hand: the scores of the words are filled with -1e9, and those of the padding stay."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/inverted-mask", ["mask", "forward"]


class Words(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.words, self.mix, self.out, self.hidden = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 2), hidden

    def forward(self, x):
        q, k, v = self.mix(self.words(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(((x == 0) == self.hidden)[:, None], -1e9)
        return self.out((scores.softmax(-1) @ v)[:, 0])


def training(hidden):
    torch.manual_seed(107)
    x, y = torch.randint(3, 20, (400, 9)), torch.randint(0, 2, (400,))
    x[:, 1] = 1 + y
    x[torch.arange(9) >= torch.randint(3, 7, (400, 1))] = 0
    model = Words(hidden)
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), cross_entropy, loaders(x, y), 8)


def sick():
    return training(hidden=False)


def healthy():
    return training(hidden=True)
