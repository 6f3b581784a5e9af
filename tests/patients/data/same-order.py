"""The sampler seeds its generator anew in each epoch."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, NAMES = "data/same-order", ("set_epoch",)


class Shuffled:
    def __init__(self, sick):
        self.sick, self.epoch = sick, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        seed = 7 if self.sick else 7 + self.epoch
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(seed)).tolist())


def training(sick):
    return SimpleNamespace(loader=DataLoader(torch.arange(24.0), batch_size=4, sampler=Shuffled(sick)))


def sick():
    return training(True)


def healthy():
    return training(False)
