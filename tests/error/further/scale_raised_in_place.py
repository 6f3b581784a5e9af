"""The scale of a flow's layer is raised a little in place, after it was used."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/inplace-modified", "names": ["scale"]}


class Coupling(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.net = nn.Linear(d // 2, d)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        scale = torch.exp(s)
        b = b * scale + t
        if self.training and self.noisy:
            scale.add_(1e-3)
        return torch.cat([a, b], -1), scale.log().sum(-1)


def build(fixed=False):
    torch.manual_seed(0)
    flow = nn.ModuleList([Coupling(4) for _ in range(3)])
    for c in flow:
        c.noisy = not fixed

    def nll(x):
        logdet = 0
        for c in flow:
            x, ld = c(x)
            logdet = logdet + ld
        return (x.pow(2).sum(-1) / 2 - logdet).mean()

    def trigger():
        loss = nll(torch.rand(5, 4))
        loss.backward()

    return SimpleNamespace(trigger=trigger)
