"""Weights of 1000 classes are loaded into a net for seven; the trainer raises an error of its own from it."""

from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {
    "code": "error/state-dict-mismatch",
    "names": ["classifier.1.weight", "classifier.1.bias"],
    "also": ["checkpoint/shape-changed"],
}


def mobilenet(num_classes=1000):
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            classifier=nn.Sequential(nn.Dropout(0.2), nn.Linear(6, num_classes)),
        )
    )


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        self.net = mobilenet(cfg["classes"])

    def resume(self, weights):
        try:
            self.net.load_state_dict(weights)
        except RuntimeError as e:
            raise RuntimeError(f"could not resume {self.cfg['name']}") from e


def build(fixed=False):
    torch.manual_seed(0)
    pre = mobilenet().state_dict()
    if fixed:
        pre = mobilenet(7).state_dict()
    return SimpleNamespace(trigger=lambda: Experiment({"name": "birds", "classes": 7}).resume(pre))
