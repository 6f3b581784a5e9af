"""A sampler that should bring the rare kind up is given a weight for each kind: two rows are all that it draws."""

import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/unshuffled-data", ["sampler", "train_loader"]


def training(by_sample):
    torch.manual_seed(71)
    rare = (torch.rand(500) < 0.15).long()
    x = torch.randn(500, 7) + rare[:, None]
    train_loader, val_loader = loaders(x, rare)
    weights = 1 / rare[:400].bincount()
    sampler = WeightedRandomSampler(weights[rare[:400]] if by_sample else weights, 400)
    model = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 2))
    pair = DataLoader(train_loader.dataset, 32, sampler=sampler), val_loader
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, pair, 6)


def sick():
    return training(by_sample=False)


def healthy():
    return training(by_sample=True)
