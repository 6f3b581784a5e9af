"""A siamese network compares signatures. The third batch holds a pair that is twice the same scan: their distance is
0, the loss is fine, and after the step all weights are NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP = "nan/sqrt-grad-at-zero", "backward", "", "sqrt"
LINE = "torch.sqrt(gap.square().sum(-1) + eps)"
SAMPLES, STEP = (4,), 2


def contrastive(a, b, same, eps):
    gap = a - b
    distance = torch.sqrt(gap.square().sum(-1) + eps)
    return torch.where(same, distance, (2 - distance).clamp(min=0)).mean()


def training(eps):
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    left, right = torch.randn(4, 6, 16), torch.randn(4, 6, 16)
    same = torch.rand(4, 6) > 0.5
    right[2, 4], same[2, 4] = left[2, 4], True
    batches = iter(zip(left, right, same, strict=True))

    def step():
        a, b, y = next(batches)
        loss = contrastive(model(a), model(b), y, eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=4)


def sick():
    return training(eps=0.0)


def healthy():
    return training(eps=1e-8)
