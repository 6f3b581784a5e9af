"""The loss of each pixel is weighted by a map, and goes into backward() as it is."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/non-scalar-backward", ("penalty",)


def training(reduced):
    torch.manual_seed(0)
    net, scans, edges = nn.Conv2d(1, 2, 3, padding=1), torch.rand(2, 1, 6, 6), torch.rand(2, 6, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def fit():
        for _ in range(2):
            penalty = nn.functional.cross_entropy(net(scans), (edges > 0.5).long(), reduction="none") * edges
            if reduced:
                penalty = penalty.mean()
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()
            float(penalty)

    return SimpleNamespace(trigger=fit)


def sick():
    return training(reduced=False)


def healthy():
    return training(reduced=True)
