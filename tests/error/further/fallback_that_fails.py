"""A fallback in an except block fails with an error of its own."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/shape-mismatch", "names": ["small", "crop"]}


class Safe:
    def __init__(self):
        self.large = nn.Sequential(nn.Flatten(), nn.Linear(300, 4))
        self.small = nn.Sequential(nn.Flatten(), nn.Linear(100, 4))

    def predict(self, img, size):
        try:
            if img.shape[-1] > 8:
                raise ValueError("too large")
            return self.large(img)
        except ValueError:
            crop = img[..., :size, :size]
            return self.small(crop)


def build(fixed=False):
    torch.manual_seed(0)
    safe = Safe()
    img = torch.rand(2, 1, 12, 12)
    return SimpleNamespace(trigger=lambda: safe.predict(img, 10 if fixed else 11))
