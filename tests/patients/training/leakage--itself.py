"""A recurrent network is to tell the next token, and is given the token itself as the target."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/leakage", ["target", "train_loader"]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.mix, self.out = nn.Embedding(11, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 11)

    def forward(self, x):
        return self.out(self.mix(self.token(x))[0])


def training(shift):
    torch.manual_seed(57)
    text = torch.randint(0, 11, (300, 9))
    for t in range(1, 9):
        text[:, t] = torch.where(torch.rand(300) < 0.7, (text[:, t - 1] + 3) % 11, text[:, t])
    model = Tokens()

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    pair = loaders(text[:, :-1], text[:, shift : 8 + shift].clone())
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, pair, 5)


def sick():
    return training(shift=0)


def healthy():
    return training(shift=1)
