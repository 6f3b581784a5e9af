"""A token made in forward is on the CPU, the patches are not (the meta device stands in for an accelerator)."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/device-mismatch", "names": ["cls", "patches"]}


class Vit(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.proj, self.on = nn.Conv2d(3, 8, 4, 4), on

    def forward(self, img):
        patches = self.proj(img).flatten(2).mT
        cls = torch.zeros(img.shape[0], 1, 8, device=img.device if self.on else None)
        return torch.cat([cls, patches], 1)


def build(fixed=False):
    vit = Vit(fixed).to("meta")
    return SimpleNamespace(trigger=lambda: vit(torch.rand(2, 3, 8, 8, device="meta")))
