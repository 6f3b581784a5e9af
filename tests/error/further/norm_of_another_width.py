"""A norm built for 8 channels is given 16, in a list of stages."""

from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/shape-mismatch", "names": ["stages.1.bn"]}


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        mk = lambda i, o, b: nn.Sequential(OrderedDict(conv=nn.Conv2d(i, o, 3), bn=nn.BatchNorm2d(b), act=nn.ReLU()))
        self.stages = nn.ModuleList([mk(3, 8, 8), mk(8, 16, w)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


def build(fixed=False):
    torch.manual_seed(0)
    net = Net(16 if fixed else 8)
    return SimpleNamespace(trigger=lambda: net(torch.rand(2, 3, 9, 9)))
