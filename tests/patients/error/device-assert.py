"""A kernel fails on the card and the error shows lines later; the ids came from nowhere that can still be read. (A
stand-in says the card's words: there is no card in a test.)
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/device-assert", ("CUDA_LAUNCH_BLOCKING", "reader.words", "40 rows")
CARD = {}
exec(
    """
def wait(failed):
    if failed:
        raise RuntimeError("CUDA error: device-side assert triggered\\\\nCUDA kernel errors might be asynchronously "
                           "reported at some other API call, so the stacktrace below might be incorrect.")
""",
    CARD,
)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 6)

    def forward(self, ids):
        return self.words(ids).mean()


def training(failed):
    torch.manual_seed(0)
    reader = Reader()

    def fit():
        mean = reader(torch.randint(40, (2, 5)))
        CARD["wait"](failed)
        return mean

    return SimpleNamespace(trigger=fit)


def sick():
    return training(failed=True)


def healthy():
    return training(failed=False)
