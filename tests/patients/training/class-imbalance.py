"""One machine in sixty fails; the loss counts failures and the rest alike. The twin weights them."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/class-imbalance", ["train_loader", "loss_fn"]


def training(weight):
    torch.manual_seed(69)
    fails = (torch.rand(2000) < 1 / 60).float()
    x = torch.randn(2000, 6) + fails[:, None] * 0.6
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    pos_weight = torch.tensor(60.0) if weight else None

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1], pos_weight=pos_weight)

    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss_fn, loaders(x, fails), 4)


def sick():
    return training(weight=False)


def healthy():
    return training(weight=True)
