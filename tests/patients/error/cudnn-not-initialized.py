"""The first convolution on a card whose memory is full: cuDNN can't start. (Said here in its words by a stand-in: there
is no card in a test.)
"""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

CODE, NAMES = "error/cudnn-not-initialized", ("memory", "CUDNN_STATUS_NOT_INITIALIZED")
CARD = {}
exec(
    """
def convolve(picture, weight, bias, *settings):
    raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
""",
    CARD,
)


def training(full):
    torch.manual_seed(0)
    edges, photos = nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8)

    def look():
        with mock.patch.object(nn.functional, "conv2d", CARD["convolve"] if full else nn.functional.conv2d):
            return edges(photos)

    return SimpleNamespace(trigger=look)


def sick():
    return training(full=True)


def healthy():
    return training(full=False)
