"""A data set is split by shares that are rounded: one sample is left over."""

from types import SimpleNamespace

import torch
from torch.utils.data import TensorDataset, random_split

CODE, NAMES = "error/dataset-length", ("houses",)


def training(number):
    houses = TensorDataset(torch.rand(number, 3))

    def split():
        first = int(0.7 * len(houses))
        return random_split(houses, [first, int(0.3 * len(houses))])

    return SimpleNamespace(trigger=split)


def sick():
    return training(number=15)


def healthy():
    return training(number=20)
