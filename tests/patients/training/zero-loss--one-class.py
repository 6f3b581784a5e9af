"""Pairs that were chosen, and none that were not: all labels are 1. The twin draws others as label 0."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE, RUN = "training/zero-loss", ["loss_fn", "train_loader"], True


class Match(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader, self.book, self.offset = nn.Embedding(60, 4), nn.Embedding(50, 4), nn.Embedding(50, 1)

    def forward(self, reader, book):
        return (self.reader(reader) * self.book(book)).mean(1) + self.offset(book).squeeze(1)


def training(negatives):
    torch.manual_seed(92)
    reader, book = (torch.randn(60, 2) @ torch.randn(2, 50) > 0.9).nonzero()[torch.randperm(500)].T
    label = torch.ones(len(reader))
    if negatives:
        reader, book = torch.cat([reader, reader]), torch.cat([book, torch.randint(0, 50, (len(book),))])
        label = torch.cat([label, torch.zeros(len(label))])
    pair = [
        DataLoader(TensorDataset(*(t[rows] for t in (reader, book, label))), 32, shuffle=True)
        for rows in (slice(0, None, 2), slice(1, None, 2))
    ]
    model = Match()

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])

    return made(model, torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-3), loss_fn, pair, 12)


def sick():
    return training(negatives=False)


def healthy():
    return training(negatives=True)
