"""Weights that were saved on a card are loaded where none is. (A stand-in for torch.load says its words, so that the
test is the same on a machine with a card.)
"""

from types import SimpleNamespace

import torch

CODE, NAMES = "error/cuda-unavailable", ("map_location", "restore")
CARD = {}
exec(
    """
def restore(path, map_location=None):
    if map_location is None:
        raise RuntimeError("Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.")
    return {"weight": 1}
""",
    CARD,
)


def training(place):
    restore = CARD["restore"]

    def resume():
        return restore("weights.pt", map_location=place)

    return SimpleNamespace(trigger=resume)


def sick():
    return training(place=None)


def healthy():
    return training(place=torch.device("cpu"))
