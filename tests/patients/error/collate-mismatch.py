"""Sentences of several lengths, each a tensor of its own length, and the loader's own way to make a batch of them."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

CODE, NAMES = "error/collate-mismatch", ("tokens", "sentences", "pad_sequence")


def training(pad_to):
    torch.manual_seed(0)
    sentences = []
    for length in (6, 6, 6, 9, 6, 6):
        tokens = torch.randint(1, 50, (length,))
        sentences.append({"tokens": torch.nn.functional.pad(tokens, (0, max(0, pad_to - length))), "label": length % 2})

    def train():
        for batch in DataLoader(sentences, batch_size=3):
            batch["tokens"].float().mean()

    return SimpleNamespace(trigger=train)


def sick():
    return training(pad_to=0)


def healthy():
    return training(pad_to=9)
