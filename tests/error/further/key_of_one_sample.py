"""One sample lacks a key that the others have; the loader fails with a KeyError."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

EXPECT = {"code": "error/collate-mismatch", "names": ["depth", "2"]}


class Scenes(Dataset):
    def __init__(self, complete):
        self.complete = complete

    def __len__(self):
        return 4

    def __getitem__(self, i):
        s = {"rgb": torch.zeros(3, 4, 4), "depth": torch.zeros(1, 4, 4), "k": torch.eye(3)}
        if i == 2 and not self.complete:
            del s["depth"]
        return s


def build(fixed=False):
    loader = DataLoader(Scenes(fixed), batch_size=4)

    def run():
        for i, b in enumerate(loader):
            yield i, b["rgb"].shape

    return SimpleNamespace(trigger=lambda: dict(run()))
