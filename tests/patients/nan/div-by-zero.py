"""A recommender averages the films that a user has seen. The third batch brings a user who has just signed up, with
an empty history, and the loss is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

CODE, PHASE, MODULE, OP, LINE = "nan/div-by-zero", "forward", "taste", "div", "total / seen"
SAMPLES, STEP = (3,), 2


class Taste(nn.Module):
    def __init__(self, films, width, at_least):
        super().__init__()
        self.film = nn.Embedding(films, width, padding_idx=0)
        self.at_least = at_least

    def forward(self, history):
        total = self.film(history).sum(1)
        seen = (history != 0).sum(1, keepdim=True).clamp(min=self.at_least)
        return total / seen


class Recommender(nn.Module):
    def __init__(self, at_least):
        super().__init__()
        self.taste = Taste(40, 12, at_least)
        self.next = nn.Linear(12, 40)

    def forward(self, history):
        return self.next(self.taste(history))


def training(at_least):
    torch.manual_seed(11)
    model = Recommender(at_least)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    histories = torch.randint(1, 40, (4, 6, 5))
    histories[:, :, 4] = 0
    histories[2, 3] = 0
    batches = iter(zip(histories, torch.randint(1, 40, (4, 6)), strict=True))

    def step():
        history, liked = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(history), liked)
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=4)


def sick():
    return training(at_least=0)


def healthy():
    return training(at_least=1)
