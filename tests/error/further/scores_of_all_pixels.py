"""One matrix of scores over all pairs of pixels of a large picture."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/out-of-memory", "names": ["q", "k"]}


class NonLocal(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.theta, self.phi = nn.Conv2d(c, 1, 1), nn.Conv2d(c, 1, 1)

    def forward(self, x):
        q = self.theta(x).flatten(2).transpose(1, 2)
        k = self.phi(x).flatten(2)
        scores = q @ k
        return scores.softmax(-1).sum()


def build(fixed=False):
    torch.manual_seed(0)
    net = nn.ModuleDict({"attn": NonLocal(1)})
    side = 16 if fixed else 2800  # 246 TB: more than any address space

    def trigger():
        with torch.inference_mode():
            return net["attn"](torch.zeros(1, 1, side, side))

    return SimpleNamespace(trigger=trigger)
