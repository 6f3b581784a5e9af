"""A recipe for 20,000 steps of warm-up, taken over for a run of a hundred."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/lr-too-low", ["scheduler", "lr"]


def training(warm_up):
    torch.manual_seed(89)
    kind = torch.randint(0, 4, (640,))
    x = 1.5 * torch.randn(4, 8)[kind] + 0.6 * torch.randn(640, 8)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    return made(model, optimizer, cross_entropy, loaders(x, kind), 7, scheduler=scheduler, each="batch")


def sick():
    return training(warm_up=20_000)


def healthy():
    return training(warm_up=12)
