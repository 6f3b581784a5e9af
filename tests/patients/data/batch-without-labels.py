"""Two prompts fill the whole length, and every label of their batch is masked."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, NAMES = "data/batch-without-labels", ("batch 1",)


def training(sick):
    rows = [{"input_ids": torch.arange(4), "labels": torch.tensor([-100, -100, 5, 6])} for _ in range(6)]
    for row in rows[2:4] if sick else rows[2:3]:
        row["labels"] = torch.full((4,), -100)
    return SimpleNamespace(loader=DataLoader(rows, batch_size=2))


def sick():
    return training(True)


def healthy():
    return training(False)
