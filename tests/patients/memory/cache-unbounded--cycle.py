"""A loader is made endless by itertools.cycle, which keeps each batch of the first round to give it again."""

import itertools
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

CODE, HOLDER, LINE = "memory/cache-unbounded", ["stream"], "itertools.cycle(loader)"


class Noise(Dataset):
    def __len__(self):
        return 5000

    def __getitem__(self, index):
        return torch.rand(2, 64, 64)


def again_and_again(loader):
    while True:
        yield from loader


def loading(plain):
    loader = DataLoader(Noise(), batch_size=8)
    stream = again_and_again(loader) if plain else itertools.cycle(loader)
    return SimpleNamespace(
        model=None, optimizer=None, step=lambda: next(stream).mean(), steps=3, names={"stream": stream}
    )


def sick():
    return loading(plain=False)


def healthy():
    return loading(plain=True)
