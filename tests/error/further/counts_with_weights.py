"""A counter of whole numbers is given weights in place."""

from types import SimpleNamespace

import torch

EXPECT = {"code": "error/dtype-mismatch", "names": ["hist", "weights"]}


class Histogram:
    def __init__(self, n, as_float):
        self.hist = torch.zeros(n) if as_float else torch.zeros(n, dtype=torch.long)

    def add(self, weights):
        self.hist += weights
        return self


def build(fixed=False):
    return SimpleNamespace(trigger=lambda: [Histogram(4, fixed).add(w) for w in torch.rand(3, 4)])
