"""A bag-of-words model in float16 with AdamW. One word of the vocabulary never occurs, its weights have gradient 0,
and after the first step they are NaN: eps is 1e-8, and that is 0 in float16.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE = "nan/optimizer-eps-underflow", "optimizer", "topic"
OP, LINE = "addcdiv", "optimizer.step()"
SAMPLES, STEP = None, 0


class Topics(nn.Module):
    def __init__(self):
        super().__init__()
        self.topic = nn.Linear(9, 3)

    def forward(self, counts):
        return self.topic(counts)


def training(eps):
    torch.manual_seed(37)
    model = Topics().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps)
    topics = torch.arange(12) % 3
    counts = torch.poisson(torch.full((12, 9), 1.0)) + 4 * torch.eye(3)[topics].repeat(1, 3)
    counts[:, 4] = 0
    counts = counts.half()

    def step():
        loss = nn.functional.cross_entropy(model(counts).float(), topics)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2)


def sick():
    return training(eps=1e-8)


def healthy():
    return training(eps=1e-4)
