"""Bilinear features are pooled and put through a signed square root, written with torch.where. The features are
finite, and all gradients are NaN from the first step.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP = "nan/where-grad", "backward", "root", "sqrt"
LINE = "torch.where(x > 0, torch.sqrt(x), -torch.sqrt(-x))"
SAMPLES, STEP = None, 0


class SignedRoot(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.safe = safe

    def forward(self, x):
        if self.safe:
            return x.sign() * torch.sqrt(x.abs() + 1e-6)
        return torch.where(x > 0, torch.sqrt(x), -torch.sqrt(-x))


class Bilinear(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.left, self.right = nn.Conv1d(3, 5, 3), nn.Conv1d(3, 5, 3)
        self.root = SignedRoot(safe)
        self.bird = nn.Linear(25, 4)

    def forward(self, x):
        pooled = self.left(x) @ self.right(x).transpose(1, 2) / x.shape[-1]
        return self.bird(self.root(pooled.flatten(1)))


def training(safe):
    torch.manual_seed(23)
    model = Bilinear(safe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    songs, birds = torch.randn(6, 3, 14), torch.randint(0, 4, (6,))

    def step():
        loss = nn.functional.cross_entropy(model(songs), birds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2)


def sick():
    return training(safe=False)


def healthy():
    return training(safe=True)
