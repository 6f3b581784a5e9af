"""Masks of class numbers are halved by averages: between a road and a roof lies a line of grass."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/label-noise", ["mask", "train_loader"]


def training(mode):
    torch.manual_seed(31)
    colour = 1.5 * torch.randn(6, 3)
    mask = torch.zeros(120, 40, 40, dtype=torch.long)
    for picture in mask:
        for _ in range(10):
            (y, x), (h, w) = torch.randint(0, 32, (2,)).tolist(), torch.randint(3, 9, (2,)).tolist()
            picture[y : y + h, x : x + w] = int(torch.randint(1, 6, ()))
    pictures = colour[mask].permute(0, 3, 1, 2) + 0.3 * torch.randn(120, 3, 40, 40)
    pictures = nn.functional.interpolate(pictures, scale_factor=0.5, mode="bilinear")
    small = nn.functional.interpolate(mask[:, None].float(), scale_factor=0.5, mode=mode)[:, 0].round().long()
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 6, 3, padding=1))
    return made(model, torch.optim.Adam(model.parameters(), lr=0.01), cross_entropy, loaders(pictures, small, 12), 8)


def sick():
    return training("bilinear")


def healthy():
    return training("nearest")
