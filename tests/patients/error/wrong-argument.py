"""A tokenizer gives one entry more than the model has arguments for."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/wrong-argument", ("scorer", "segments", "entries")


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(40, 6), nn.Linear(6, 2)

    def forward(self, ids, kept):
        return self.head((self.table(ids) * kept.unsqueeze(-1)).mean(1))


def training(segments):
    torch.manual_seed(0)
    scorer = Scorer()
    entries = {"ids": torch.randint(40, (3, 8)), "kept": torch.ones(3, 8)}
    if segments:
        entries["segments"] = torch.zeros(3, 8)

    def score():
        return scorer(**entries).mean()

    return SimpleNamespace(trigger=score)


def sick():
    return training(segments=True)


def healthy():
    return training(segments=False)
