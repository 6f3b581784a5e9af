"""Weights saved from a model in DataParallel are loaded into the bare one."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/state-dict-mismatch", ("weights", "module.", "network")


def training(fixed):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    weights = (network if fixed else nn.DataParallel(network)).state_dict()

    def resume():
        network.load_state_dict(weights)

    return SimpleNamespace(trigger=resume)


def sick():
    return training(fixed=False)


def healthy():
    return training(fixed=True)
