"""A sampler with a weight for each kind draws the first three rows alone, one of each kind. Any column tells these
apart, and is no leak."""

import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/unshuffled-data", ["sampler", "train_loader"]


def training(by_sample):
    torch.manual_seed(73)
    kind = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 600, replacement=True)
    kind[:3] = torch.arange(3)
    x = torch.randn(600, 40) + torch.randn(3, 40)[kind]
    train_loader, val_loader = loaders(x, kind)
    known = kind[: len(train_loader.dataset)]
    weights = 1 / known.bincount()
    sampler = WeightedRandomSampler(weights[known] if by_sample else weights, len(known))
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 3))
    pair = DataLoader(train_loader.dataset, 32, sampler=sampler), val_loader
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, pair, 6)


def sick():
    return training(by_sample=False)


def healthy():
    return training(by_sample=True)
