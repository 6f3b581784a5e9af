"""Attention weights are masked in place after softmax, in the second of two layers."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/inplace-modified", "names": ["probs"]}


class Attn(nn.Module):
    def __init__(self, d, safe):
        super().__init__()
        self.q, self.k, self.v, self.safe = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), safe

    def forward(self, x, mask):
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        probs = s.softmax(-1)
        if self.safe:
            probs = probs.masked_fill(mask, 0.0)
        else:
            probs.masked_fill_(mask, 0.0)
        return probs @ self.v(x)


def build(fixed=False):
    torch.manual_seed(0)
    m = nn.ModuleList([Attn(8, True), Attn(8, fixed)])
    mask = torch.ones(5, 5).triu(1).bool()

    def run(x):
        for blk in m:
            x = x + blk(x, mask)
        return x.pow(2).mean()

    return SimpleNamespace(trigger=lambda: run(torch.rand(2, 5, 8)).backward())
