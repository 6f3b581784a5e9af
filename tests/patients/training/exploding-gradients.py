"""A state that is multiplied by a matrix at each of fifty moments, with nothing that bounds it."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/exploding-gradients", ["hidden", "inside"]


class Recurrence(nn.Module):
    def __init__(self, bounded):
        super().__init__()
        self.inside, self.hidden, self.out = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.bounded = bounded
        nn.init.orthogonal_(self.hidden.weight, gain=1.25)

    def forward(self, x):
        state = x.new_zeros(len(x), 16)
        for t in range(x.shape[1]):
            state = self.inside(x[:, t]) + self.hidden(state)
            if self.bounded:
                state = torch.tanh(state)
        return self.out(state)


def training(bounded):
    torch.manual_seed(57)
    x = torch.randn(500, 50, 3)
    y = x[:, -5:].mean((1, 2))[:, None] * 3
    model = Recurrence(bounded)
    return made(
        model, torch.optim.SGD(model.parameters(), lr=0.01), mse, loaders(x, y), 5, clip=1.0 if bounded else None
    )


def sick():
    return training(bounded=False)


def healthy():
    return training(bounded=True)
