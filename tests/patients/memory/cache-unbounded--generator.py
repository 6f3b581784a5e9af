"""A generator of the trainer goes through its loader by itertools.cycle: each batch of the first round is kept."""

import itertools
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, HOLDER, LINE = "memory/cache-unbounded", ["batches[cycle]"], "yield from itertools.cycle(loader)"


def loading(plain):
    loader = DataLoader(range(4000), batch_size=8, collate_fn=lambda numbers: torch.rand(len(numbers), 64, 64))

    def batches():
        if plain:
            while True:
                yield from loader
        yield from itertools.cycle(loader)

    stream = batches()
    return SimpleNamespace(
        model=None, optimizer=None, step=lambda: next(stream).mean(), steps=3, names={"stream": stream}
    )


def sick():
    return loading(plain=False)


def healthy():
    return loading(plain=True)
