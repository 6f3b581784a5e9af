"""A pooled embedding was turned into NumPy to be logged, and back: the encoder before it is never trained."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/detached-graph", ["embed", "forward"]


class Bag(nn.Module):
    def __init__(self, through_numpy):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 12), nn.Linear(12, 3)
        self.through_numpy = through_numpy

    def forward(self, words):
        pooled = self.embed(words).mean(1)
        if self.through_numpy:
            pooled = torch.as_tensor(pooled.detach().numpy())
        return self.out(pooled)


def training(through_numpy):
    torch.manual_seed(61)
    words = torch.randint(0, 30, (900, 7))
    topic = (words < 10).sum(1).clamp(max=2)
    model = Bag(through_numpy)
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), cross_entropy, loaders(words, topic), 4)


def sick():
    return training(through_numpy=True)


def healthy():
    return training(through_numpy=False)
