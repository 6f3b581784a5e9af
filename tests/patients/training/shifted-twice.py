"""The data set gives each row's next tokens as labels, and the loss moves them on once more."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/shifted-twice", ["target", "loss_fn"]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.mix, self.out = nn.Embedding(11, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 11)

    def forward(self, x):
        return self.out(self.mix(self.token(x))[0])


def training(again):
    torch.manual_seed(111)
    text = torch.randint(0, 11, (300, 9))
    for t in range(1, 9):
        text[:, t] = torch.where(torch.rand(300) < 0.7, (text[:, t - 1] + 3) % 11, text[:, t])
    model = Tokens()

    def loss_fn(model, batch):
        logits, labels = model(batch[0]), batch[1]
        if again:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    pair = loaders(text[:, :-1], text[:, 1:].clone())
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, pair, 5)


def sick():
    return training(again=True)


def healthy():
    return training(again=False)
