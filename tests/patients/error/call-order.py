"""A gradient scaler unscales the gradients for the clipping, and once more for a norm that is printed."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/call-order", ("scaler", "unscale_", "update")


def training(measures):
    torch.manual_seed(0)
    net, rows = nn.Linear(6, 1), torch.rand(5, 6)
    steps, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(net(rows).square().mean()).backward()
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if measures:
            size = net.weight.grad.norm()
            scaler.unscale_(steps)
            print(size)
        scaler.step(steps)
        scaler.update()

    return SimpleNamespace(trigger=step)


def sick():
    return training(measures=True)


def healthy():
    return training(measures=False)
