"""What is to be denoised is nothing but the noise that is to be told."""

import torch
from torch import nn

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/leakage", ["noise", "target"]


def training(kept):
    torch.manual_seed(95)
    x, y = clusters(480)
    model = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 12))

    def loss_fn(model, batch):
        noise = torch.randn_like(batch[0])
        share = kept * torch.rand(len(noise), 1)
        return nn.functional.mse_loss(model(share.sqrt() * batch[0] + (1 - share).sqrt() * noise), noise)

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, y), 5)


def sick():
    return training(kept=1e-5)


def healthy():
    return training(kept=1.0)
