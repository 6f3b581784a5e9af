"""Short sentences are filled up to sixty words, and the state after the last of these is what is classified."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE, RUN = "training/vanishing-gradients", ["read", "padding"], True


class Sentences(nn.Module):
    def __init__(self, at_end):
        super().__init__()
        self.words, self.read, self.out = nn.Embedding(20, 12, 0), nn.LSTM(12, 24, batch_first=True), nn.Linear(24, 2)
        self.at_end = at_end

    def forward(self, x):
        states = self.read(self.words(x))[0]
        return self.out(states[:, -1] if self.at_end else states[torch.arange(len(x)), (x != 0).sum(1) - 1])


def training(at_end):
    torch.manual_seed(68)
    x, y = torch.randint(3, 20, (300, 60)), torch.randint(0, 2, (300,))
    x[:, 1] = 1 + y
    x[torch.arange(60) >= torch.randint(3, 7, (300, 1))] = 0
    model = Sentences(at_end)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, loaders(x, y), 5)


def sick():
    return training(at_end=True)


def healthy():
    return training(at_end=False)
