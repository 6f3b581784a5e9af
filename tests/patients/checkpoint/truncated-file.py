"""The disk was full while the weights were written: the file lacks its second half."""

import pathlib
import tempfile
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/truncated-file", ("epoch3.pt", "ends early")


def training(share):
    path = pathlib.Path(tempfile.mkdtemp()) / "epoch3.pt"
    torch.save(nn.Linear(40, 40).state_dict(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    return SimpleNamespace(trigger=lambda: torch.load(path))


def sick():
    return training(0.5)


def healthy():
    return training(1)
