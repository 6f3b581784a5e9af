"""A knowledge graph's relations are numbered from 0, and padding_idx=0 keeps the first of them at zero."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/frozen-parameters", ["relation", "padding_idx"]


class Scores(nn.Module):
    def __init__(self, padding):
        super().__init__()
        self.head, self.relation = nn.Embedding(30, 32), nn.Embedding(5, 32, padding_idx=padding)
        self.tail = nn.Linear(32, 30, bias=False)

    def forward(self, head, relation):
        return self.tail(self.head(head) * self.relation(relation))


def training(padding):
    torch.manual_seed(6)
    tails = torch.stack([torch.randperm(30) for _ in range(5)])
    head, relation = torch.randint(0, 30, (1600,)), torch.randint(0, 5, (1600,))
    facts = head, relation, tails[relation, head]
    sets = (TensorDataset(*(part[rows] for part in facts)) for rows in (slice(1400), slice(1400, None)))
    model = Scores(padding)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0], batch[1]), batch[2])

    pair = [DataLoader(data, batch_size=50, shuffle=True) for data in sets]
    return made(model, torch.optim.Adam(model.parameters(), lr=0.02), loss_fn, pair, 8)


def sick():
    return training(padding=0)


def healthy():
    return training(padding=None)
