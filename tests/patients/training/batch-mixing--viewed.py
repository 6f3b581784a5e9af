"""Pictures of (N, H, W, C) are viewed as (N, C, H, W), as their numbers lie, and not permuted."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made, shapes

CODE, WHERE = "training/batch-mixing", ["view", "forward"]


class Pictures(nn.Module):
    def __init__(self, permuted):
        super().__init__()
        self.see, self.out, self.permuted = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(32, 4), permuted

    def forward(self, x):
        x = x.permute(0, 3, 1, 2) if self.permuted else x.view(-1, 3, 12, 12)
        h = nn.functional.adaptive_avg_pool2d(self.see(x).relu(), 2)
        return self.out(h.flatten(1))


def training(permuted):
    torch.manual_seed(110)
    x, y = shapes(600, size=12)
    x = torch.cat([x, x / 2 + 0.3 * torch.randn_like(x), torch.randn_like(x) / 2], 1).permute(0, 2, 3, 1).contiguous()
    model = Pictures(permuted)
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, loaders(x, y), 8)


def sick():
    return training(permuted=False)


def healthy():
    return training(permuted=True)
