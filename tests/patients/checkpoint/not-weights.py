"""A repository was cloned without Git LFS: what has the name of the weights is a pointer of three lines."""

import pathlib
import tempfile
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/not-weights", ("weights.bin", "LFS")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 31337\n"


def training(pointer):
    path = pathlib.Path(tempfile.mkdtemp()) / "weights.bin"
    torch.save(nn.Linear(4, 4).state_dict(), path)
    if pointer:
        path.write_text(POINTER)
    return SimpleNamespace(trigger=lambda: torch.load(path))


def sick():
    return training(pointer=True)


def healthy():
    return training(pointer=False)
