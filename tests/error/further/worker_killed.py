"""A worker of the loader is killed."""

import os
import signal
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

EXPECT = {"code": "error/loader-worker-died", "names": ["Tiles"]}


class Tiles(Dataset):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if self.bad and i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2, 2)


def build(fixed=False):
    def trigger():
        for tile in DataLoader(Tiles(not fixed), num_workers=1):
            tile.sum()

    return SimpleNamespace(trigger=trigger)
