"""A data set keeps a hundred thousand captions as strings, and its loader has workers."""

from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

CODE, HOLDER, LINE = "memory/loader-workers-copy", ["loader.dataset.captions"], None


class Captions(Dataset):
    def __init__(self, pack):
        self.captions = pack([f"picture {number} shows a street and {number % 97} trees" for number in range(100_000)])

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(len(self.captions[index]))


def training(pack):
    loader = DataLoader(Captions(pack), batch_size=10, num_workers=2)

    def step():
        return sum(int(batch.sum()) for batch in loader)

    return SimpleNamespace(model=None, optimizer=None, step=step, steps=1, loader=loader, names={"loader": loader})


def sick():
    return training(list)


def healthy():
    return training(lambda captions: np.array(captions, dtype=np.bytes_))
