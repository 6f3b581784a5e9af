"""A transposed batch goes into a convolution (cuDNN's words come from a stand-in: there is no card)."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

EXPECT = {"code": "error/cudnn-not-supported", "names": ["spec", "contiguous"]}
FAKE = {}
exec(
    """
def conv1d(input, weight, bias=None, *rest):
    if not input.is_contiguous():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
                           "non-contiguous input.")
    return input[:, : len(weight)]
""",
    FAKE,
)


class Asr(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(12, 8, 3), nn.ReLU())

    def forward(self, spec):
        return self.front(spec).mean()


def build(fixed=False):
    torch.manual_seed(0)
    asr = Asr()

    def collate(waves):
        x = torch.stack(waves).transpose(1, 2)
        return x.contiguous() if fixed else x

    def trigger():
        with mock.patch.object(nn.functional, "conv1d", FAKE["conv1d"]):
            for spec in [collate([torch.rand(20, 12) for _ in range(3)])]:
                asr(spec)

    return SimpleNamespace(trigger=trigger)
