"""Tones of melodies, padded to one length: the padding counts as a tone of its own, and is nearly all of the loss."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/class-imbalance", ["loss_fn", "train_loader"]
RUN = True


class Melody(nn.Module):
    def __init__(self):
        super().__init__()
        self.tone = nn.Embedding(14, 12)
        self.rnn = nn.GRU(12, 24, batch_first=True)
        self.out = nn.Linear(24, 5)

    def forward(self, tones):
        return self.out(self.rnn(self.tone(tones))[0])


def training(ignored):
    torch.manual_seed(83)
    tones = torch.randint(1, 14, (500, 30))
    real = torch.arange(30) < torch.randint(2, 5, (500, 1))
    nexts = torch.where(real, 1 + (tones + tones.roll(1, 1) * (torch.arange(30) > 0)) % 4, 0)
    model = Melody()

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], ignore_index=ignored)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return made(model, optimizer, loss_fn, loaders(tones * real, nexts), 8)


def sick():
    return training(ignored=-100)


def healthy():
    return training(ignored=0)
