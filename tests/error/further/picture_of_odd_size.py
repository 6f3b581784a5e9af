"""A U-Net on a picture of odd size: the map on its way up is one pixel smaller than the one to join."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

EXPECT = {"code": "error/shape-mismatch", "names": ["skip", "x"]}


def dbl(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UpBlock(nn.Module):
    def __init__(self, a, b, pad):
        super().__init__()
        self.up, self.conv, self.pad = nn.ConvTranspose2d(a, b, 2, 2), dbl(2 * b, b), pad

    def forward(self, x, skip):
        x = self.up(x)
        if self.pad:
            x = F.interpolate(x, size=skip.shape[-2:])
        x = torch.cat([skip, x], dim=1)
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, pad):
        super().__init__()
        chs = [4, 8, 16]
        self.downs = nn.ModuleList(dbl(i, o) for i, o in zip([3] + chs, chs))
        self.ups = nn.ModuleList(UpBlock(a, b, pad) for a, b in zip(chs[::-1], chs[::-1][1:]))
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.downs):
            x = d(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for up, s in zip(self.ups, skips[-2::-1]):
            x = up(x, s)
        return self.head(x)


def build(fixed=False):
    torch.manual_seed(0)
    net = UNet(fixed)
    image, true_mask = torch.rand(2, 3, 38, 50), torch.rand(2, 1, 38, 50).round()
    crit = nn.BCEWithLogitsLoss()
    return SimpleNamespace(trigger=lambda: crit(net(image), true_mask).backward())
