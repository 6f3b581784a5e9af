"""A long text is cut into windows, each judged without what stands before it."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

CODE, NAMES = "quality/window-without-stride", ["windows", "window-without-stride.py"]


class Memory(nn.Module):
    """A token is likely where it has been before: context helps."""

    def forward(self, ids):
        return torch.log1p(F.one_hot(ids, 30).cumsum(1).double()) * 2


def evaluation(window):
    model = Memory()
    tokens = torch.randint(0, 9, (1, 200), generator=torch.Generator().manual_seed(3))

    def evaluate():
        losses = []
        for start in range(0, tokens.shape[1], window):
            ids = tokens[:, start : start + window]
            losses.append(F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none"))
        return torch.cat(losses).mean().exp().item()

    return SimpleNamespace(model=model, tokens=tokens, reported=evaluate, window=16)


def sick():
    return evaluation(16)


def healthy():
    return evaluation(200)
