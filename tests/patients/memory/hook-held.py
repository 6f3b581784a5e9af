"""A probe for a feature plot appends what each layer gives, and nobody takes it out."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/hook-held", ["probe.seen"], "self.seen.append(output)"


class Probe:
    def __init__(self, keep):
        self.seen, self.keep = [], keep

    def __call__(self, module, args, output):
        if self.keep:
            self.seen.append(output)
        else:
            self.seen = [output.detach().mean()]


def training(keep):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(48, 300), nn.Tanh(), nn.Linear(300, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = Probe(keep)
    model[1].register_forward_hook(probe)

    def step():
        optimizer.zero_grad()
        model(torch.randn(200, 48)).square().mean().backward()
        optimizer.step()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3, names={"probe": probe})


def sick():
    return training(keep=True)


def healthy():
    return training(keep=False)
