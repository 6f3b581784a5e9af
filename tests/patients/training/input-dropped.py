"""Samples are words and a table; what collates them gives the words alone, and the model takes zeros for the rest."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.training.loops import made

CODE, WHERE = "training/input-dropped", ["table"]


class Notes(Dataset):
    def __init__(self, n):
        self.words, self.table = torch.randint(0, 30, (n, 8)), torch.randn(n, 3)
        self.kind = ((self.words < 10).sum(1) - 2.7 + 2 * self.table[:, 0] > 0).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"words": self.words[index], "table": self.table[index], "name": f"note {index}", "y": self.kind[index]}


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.table = nn.EmbeddingBag(30, 16), nn.Linear(3, 16)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 2))

    def forward(self, words, table=None, **others):
        return self.head(self.words(words) + (0 if table is None else self.table(table)))


def training(*names):
    torch.manual_seed(62)

    def collate(items):
        return default_collate([{name: item[name] for name in names} for item in items])

    pair = (DataLoader(Notes(n), 32, shuffle=n > 200, collate_fn=collate) for n in (640, 160))
    model = Sorter()

    def loss_fn(model, batch):
        return F.cross_entropy(model(**{name: part for name, part in batch.items() if name != "y"}), batch["y"])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, tuple(pair), 8)


def sick():
    return training("words", "y")


def healthy():
    return training("words", "table", "y")
