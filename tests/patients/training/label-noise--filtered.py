"""Some samples were dropped, and their labels were not; there is no validation set."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import clusters, cross_entropy, made

CODE, WHERE = "training/label-noise", ["train_loader", "labels"]


def training(labels_too):
    torch.manual_seed(88)
    x, y = clusters(460, classes=4, spread=0.8)
    kept = torch.rand(460) < 0.92
    labels = y[kept] if labels_too else y[: int(kept.sum())]
    model = nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 4))
    pair = DataLoader(TensorDataset(x[kept], labels), 32, shuffle=True), None
    return made(model, torch.optim.Adam(model.parameters(), lr=1.5e-2), cross_entropy, pair, 20)


def sick():
    return training(labels_too=False)


def healthy():
    return training(labels_too=True)
