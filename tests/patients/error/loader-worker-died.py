"""A transform that ends the whole process where it meets a bad sample: harmless in the notebook's own eyes, deadly for
a worker."""

import os
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

CODE, NAMES = "error/loader-worker-died", ("samples", "Samples", "num_workers")


class Samples(Dataset):
    def __init__(self, strict):
        self.strict = strict

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if self.strict and i == 5:
            os._exit(1)
        return torch.full((4,), float(i))


def training(strict):
    def train():
        samples = DataLoader(Samples(strict), batch_size=2, num_workers=1)
        for batch in samples:
            batch.mean()

    return SimpleNamespace(trigger=train)


def sick():
    return training(strict=True)


def healthy():
    return training(strict=False)
