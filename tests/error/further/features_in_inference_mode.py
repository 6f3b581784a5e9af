"""Features made in inference mode go into a head that is trained."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/no-grad-path", "names": ["feats", "inference_mode"]}


class Probe:
    def __init__(self):
        self.trunk, self.head = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 2)
        self.opt = torch.optim.SGD(self.head.parameters(), 0.1)

    def cache(self, x, fixed):
        with torch.no_grad() if fixed else torch.inference_mode():
            return self.trunk(x)

    def fit(self, x, y, fixed):
        feats = self.cache(x, fixed)
        for _ in range(2):
            loss = nn.functional.cross_entropy(self.head(feats), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()


def build(fixed=False):
    torch.manual_seed(0)
    return SimpleNamespace(trigger=lambda: Probe().fit(torch.rand(4, 6), torch.tensor([0, 1, 1, 0]), fixed))
