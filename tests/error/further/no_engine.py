"""cuDNN finds no engine for a grouped convolution in bfloat16 (its words come from a stand-in: there is no card)."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

EXPECT = {"code": "error/cudnn-not-supported", "names": ["net.0"]}
FAKE = {}
exec(
    """
def conv2d(input, weight, *rest):
    if input.dtype == weight.dtype and str(input.dtype) == 'torch.bfloat16':
        raise RuntimeError("GET was unable to find an engine to execute this computation")
    return input
""",
    FAKE,
)


class Wrapper:
    def __init__(self, dtype):
        self.net = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.ReLU()).to(dtype)
        self.dtype = dtype

    def predict(self, images):
        return self.net(images.to(self.dtype))


def build(fixed=False):
    torch.manual_seed(0)
    w = Wrapper(torch.float32 if fixed else torch.bfloat16)

    def trigger():
        with mock.patch.object(nn.functional, "conv2d", FAKE["conv2d"]):
            return w.predict(torch.rand(1, 3, 8, 8))

    return SimpleNamespace(trigger=trigger)
