"""A worker of the loader leaves without a word, and the trainer raises an error of its own from that."""

import os
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

EXPECT = {"code": "error/loader-worker-died", "names": ["Volumes"]}


class Volumes(Dataset):
    def __len__(self):
        return 4

    def __init__(self, quit_at=None):
        self.quit_at = quit_at

    def __getitem__(self, i):
        if i == self.quit_at:
            os._exit(3)
        return torch.zeros(2), i


class DataModule:
    def __init__(self, quit_at):
        self.train = Volumes(quit_at)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=2, num_workers=1)


def build(fixed=False):
    dm = DataModule(None if fixed else 2)

    def fit():
        try:
            for _batch_idx, (vol, _idx) in enumerate(dm.train_dataloader()):
                vol.sum()
        except RuntimeError as e:
            raise RuntimeError("training stopped in epoch 0") from e

    return SimpleNamespace(trigger=fit)
