"""A recurrence without a bound, whose gradient is clipped when there is none yet."""

import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/exploding-gradients", ["clip_grad_norm_"]


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.RNN(2, 24, nonlinearity="relu", batch_first=True), nn.Linear(24, 1)
        with torch.no_grad():
            self.inside.weight_hh_l0.copy_(torch.eye(24))

    def forward(self, x):
        return self.out(self.inside(x)[0][:, -1])


def training(early):
    torch.manual_seed(91)
    x = torch.randn(640, 20, 2)
    model, pair = Sums(), loaders(x, x.sum((1, 2))[:, None] / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    case = made(model, optimizer, mse, pair, 6)

    def train(callback):
        step = 0
        for _ in range(6):
            for batch in pair[0]:
                optimizer.zero_grad()
                loss = mse(model, batch)
                if early:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                loss.backward()
                if not early:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                callback(step, loss.item())
                step += 1

    case.train = train
    return case


def sick():
    return training(early=True)


def healthy():
    return training(early=False)
