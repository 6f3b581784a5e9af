"""Every second column of a picture goes into a convolution, for which cuDNN has no kernel. (Said here in its words by a
stand-in: there is no card in a test.)
"""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

CODE, NAMES = "error/cudnn-not-supported", ("columns", "filters", "contiguous")
CARD = {}
exec(
    """
def convolve(picture, weight, bias, *settings):
    if not picture.is_contiguous():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
                           "non-contiguous input.")
    return picture
""",
    CARD,
)


def training(dense):
    torch.manual_seed(0)
    filters, columns = nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 16)[..., ::2]
    columns = columns.contiguous() if dense else columns

    def look():
        with mock.patch.object(nn.functional, "conv2d", CARD["convolve"]):
            return filters(columns)

    return SimpleNamespace(trigger=look)


def sick():
    return training(dense=False)


def healthy():
    return training(dense=True)
