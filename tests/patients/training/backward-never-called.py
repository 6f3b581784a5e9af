"""Features are to hold no speaker: the gradient of a speaker's classifier is turned by a module's own `backward`."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/backward-never-called", ["turn"]
RUN = True


class Turning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class Turn(nn.Module):
    def forward(self, x):
        return Turning.apply(x)


class NeverTurned(nn.Module):
    def forward(self, x):
        return x

    def backward(self, grad):
        return -0.3 * grad


class Words(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))
        self.word, self.turn = nn.Linear(12, 4), turn
        self.speaker = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        features = self.features(x)
        return self.word(features), self.speaker(self.turn(features))


def training(turn):
    torch.manual_seed(63)
    word, speaker = torch.randint(0, 4, (800,)), torch.randint(0, 5, (800,))
    x = torch.randn(4, 16)[word] + torch.randn(5, 16)[speaker] + 0.5 * torch.randn(800, 16)
    data = TensorDataset(x, word, speaker)
    pair = DataLoader(data, 32, sampler=range(600)), DataLoader(data, 32, sampler=range(600, 800))
    model = Words(turn)

    def loss_fn(model, batch):
        said, who = model(batch[0])
        return F.cross_entropy(said, batch[1]) + F.cross_entropy(who, batch[2])

    return made(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss_fn, pair, 8)


def sick():
    return training(NeverTurned())


def healthy():
    return training(Turn())
