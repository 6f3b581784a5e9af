"""A margin to the farthest other row, among which a row itself is hidden by an infinite distance: always met."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/zero-loss", ["loss_fn"]


def training(farthest):
    torch.manual_seed(97)
    places = torch.randn(400, 10)
    pairs = TensorDataset(places + 0.4 * torch.randn(400, 10), places + 0.4 * torch.randn(400, 10))
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 6))

    def loss_fn(model, batch):
        distance = torch.cdist(model(batch[0]), model(batch[1]))
        others = distance.masked_fill(torch.eye(len(distance), dtype=torch.bool), float("inf"))
        other = others.amax(1) if farthest else others.amin(1)
        return (distance.diagonal() - other + 1).relu().mean()

    pair = DataLoader(pairs, 20, shuffle=True), None
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, pair, 6)


def sick():
    return training(farthest=True)


def healthy():
    return training(farthest=False)
