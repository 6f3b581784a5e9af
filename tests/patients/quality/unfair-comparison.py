"""One of two checkpoints is still in train mode, with its dropout on."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "quality/unfair-comparison", ["`b`", "train mode"]


def pair(mode):
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)).eval()
    inputs = [torch.randn(4) for _ in range(20)]
    b = copy.deepcopy(a).train(mode)
    nn.init.normal_(b[2].bias)
    return SimpleNamespace(a=a, b=b, inputs=inputs, metric=lambda out, x: -(out - x.sum()).abs())


def sick():
    return pair(True)


def healthy():
    return pair(False)
