"""A trained, frozen network judges what another one restores. It is a part of the model, so that model.train() turns
its dropout on, and moves its running statistics."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE, RUN = "training/train-mode-in-eval", ["judge"], True


class Restorer(nn.Module):
    def __init__(self, judge, quiet):
        super().__init__()
        self.judge, self.quiet = judge.requires_grad_(False), quiet
        self.net = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 16))

    def train(self, mode=True):
        super().train(mode)
        if self.quiet:
            self.judge.eval()
        return self

    def forward(self, seen, whole):
        return self.judge(self.net(seen)), self.judge(whole)


def trained_judge(whole, kind):
    judge = nn.Sequential(nn.Linear(16, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.5), nn.Linear(96, 4))
    optimizer = torch.optim.Adam(judge.parameters(), lr=2e-2)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(judge(whole), kind).backward()
        optimizer.step()
    return judge.eval()


def training(quiet):
    torch.manual_seed(40)
    whole = torch.randn(900, 10) @ torch.randn(10, 16) / 3
    model = Restorer(trained_judge(whole, (whole @ torch.randn(16, 4)).argmax(1)), quiet)

    def loss_fn(model, batch):
        restored, wanted = model(*batch)
        return F.mse_loss(restored, wanted)

    optimizer = torch.optim.Adam(model.net.parameters(), lr=4e-3)
    return made(model, optimizer, loss_fn, loaders(whole[:, :10], whole), 8)


def sick():
    return training(quiet=False)


def healthy():
    return training(quiet=True)
