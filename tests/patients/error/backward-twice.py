"""A moving average of the outputs is a part of the loss; it keeps the graph of all steps, and the second one fails."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/backward-twice", ("average", "detach")


def training(cut):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 2))
    optimizer, inputs = torch.optim.SGD(net.parameters(), lr=0.01), torch.rand(8, 3)

    def keep(average, out):
        return 0.9 * average + 0.1 * out

    def trigger():
        average = torch.zeros(8, 2)
        for _ in range(3):
            out = net(inputs)
            average = keep(average.detach() if cut else average, out)
            loss = (out - average).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return SimpleNamespace(trigger=trigger)


def sick():
    return training(cut=False)


def healthy():
    return training(cut=True)
