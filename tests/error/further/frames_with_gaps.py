"""A decoder is given a turned view of every second frame (cuDNN's words come from a stand-in: there is no card)."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

EXPECT = {"code": "error/cudnn-not-supported", "names": ["up", "frames"]}
FAKE = {}
exec(
    """
def conv_transpose2d(input, weight, *rest):
    if not input.is_contiguous():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
                           "non-contiguous input.")
    return input
""",
    FAKE,
)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, frames):
        return self.up(frames)


class Pipeline:
    def __init__(self, fixed):
        self.decoder, self.fixed = Decoder(), fixed

    def __call__(self, batch):
        frames = batch["clip"][:, ::2][0]
        if self.fixed:
            frames = frames.contiguous()
        frames = frames if self.fixed else frames.transpose(2, 3)
        return self.decoder(frames)


def build(fixed=False):
    torch.manual_seed(0)
    pipe = Pipeline(fixed)

    def trigger():
        with mock.patch.object(nn.functional, "conv_transpose2d", FAKE["conv_transpose2d"]):
            return pipe({"clip": torch.rand(1, 6, 4, 8, 10)})

    return SimpleNamespace(trigger=trigger)
