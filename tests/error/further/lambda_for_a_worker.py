"""Workers that are spawned can't be sent a data set with a lambda in it."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

EXPECT = {"code": "error/loader-worker-died", "names": ["transform", "Faces"]}


class Scale:
    def __call__(self, x):
        return x / 255


class Faces(Dataset):
    def __init__(self, transform):
        self.data, self.transform = torch.zeros(4, 3), transform

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.transform(self.data[i])


def build(fixed=False):
    ds = Faces(Scale() if fixed else (lambda x: x / 255))

    def trigger():
        loader = DataLoader(ds, num_workers=0 if fixed else 1, multiprocessing_context=None if fixed else "spawn")
        return sum(b.sum() for b in loader)

    return SimpleNamespace(trigger=trigger)
