"""An attention layer turns its 0/1 mask into a bias by multiplying with -inf. Where the mask says "keep" that is 0
times -inf: the loss is NaN at the very first step.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/zero-times-inf", "forward", "attend", "mul", '(1 - keep) * float("-inf")'
SAMPLES, STEP = None, 0


class Attend(nn.Module):
    def __init__(self, width, by_where):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.by_where = by_where

    def forward(self, h, keep):
        if self.by_where:
            bias = torch.zeros_like(keep).masked_fill(keep == 0, float("-inf"))
        else:
            bias = (1 - keep) * float("-inf")
        scores = self.query(h) @ self.key(h).transpose(1, 2) + bias[:, None]
        return scores.softmax(-1) @ h


class Reader(nn.Module):
    def __init__(self, by_where):
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.attend = Attend(8, by_where)
        self.answer = nn.Linear(8, 2)

    def forward(self, tokens, keep):
        return self.answer(self.attend(self.words(tokens), keep).mean(1))


def training(by_where):
    torch.manual_seed(4)
    model = Reader(by_where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, answers = torch.randint(0, 30, (5, 9)), torch.randint(0, 2, (5,))
    keep = (torch.arange(9) < torch.tensor([9, 5, 7, 9, 3])[:, None]).float()

    def step():
        loss = nn.functional.cross_entropy(model(tokens, keep), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2)


def sick():
    return training(by_where=False)


def healthy():
    return training(by_where=True)
