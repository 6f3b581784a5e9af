"""A collate function of one's own gives lists of sounds of several lengths, in a dict: one holds a NaN."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, NAMES = "data/nonfinite-values", ("item 5", "inputs.sound")


def collate(rows):
    return {"inputs": {"sound": rows}, "lengths": torch.tensor([len(row) for row in rows])}


def training(sick):
    sounds = [torch.full((3 + number % 3,), float(number)) for number in range(12)]
    sounds[5][1] = float("nan") if sick else 0.0
    return SimpleNamespace(loader=DataLoader(sounds, batch_size=4, collate_fn=collate))


def sick():
    return training(True)


def healthy():
    return training(False)
