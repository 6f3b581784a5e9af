"""A network is to tell the noise in its input, and the loss draws other noise than the input got."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/label-noise", ["noise", "target"]


def training(once):
    torch.manual_seed(64)
    x = torch.randn(400, 2) * 0.1 + torch.randint(0, 2, (400, 1))
    model = nn.Sequential(nn.Linear(2, 48), nn.SiLU(), nn.Linear(48, 2))

    def loss_fn(model, batch):
        noise = torch.randn_like(batch[0])
        noisy = batch[0] + noise
        return nn.functional.smooth_l1_loss(noise if once else torch.randn_like(noise), model(noisy))

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, x), 6)


def sick():
    return training(once=False)


def healthy():
    return training(once=True)
