"""The outputs begin below what they are clamped to, in training too."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/vanishing-gradients", ["clamp"]


class Shares(nn.Module):
    def __init__(self, always):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(8, 24), nn.ReLU()), nn.Linear(24, 2)
        nn.init.constant_(self.out.bias, -2.0)
        self.always = always

    def forward(self, x):
        shares = self.out(self.body(x))
        return shares.clamp(0, 1) if self.always or not self.training else shares


def training(always):
    torch.manual_seed(95)
    x = torch.rand(600, 8)
    model = Shares(always)
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), mse, loaders(x, x.view(-1, 2, 4).mean(2)), 6)


def sick():
    return training(always=True)


def healthy():
    return training(always=False)
