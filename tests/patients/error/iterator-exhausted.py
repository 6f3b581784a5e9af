"""A loop counts steps and takes each batch by hand; the loader has fewer batches than the loop has steps."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, TensorDataset

CODE, NAMES = "error/iterator-exhausted", ("rounds", "loader", "next")


def training(steps):
    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4)

    def sum_up():
        rounds, total = iter(loader), 0.0
        for _ in range(steps):
            (batch,) = next(rounds)
            total += batch.sum().item()
        return total

    return SimpleNamespace(trigger=sum_up)


def sick():
    return training(steps=5)


def healthy():
    return training(steps=3)
