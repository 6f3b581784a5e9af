"""One batch of a long run was read with the wrong unit: a thousandfold."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import clusters, cross_entropy, made

CODE, WHERE, STEP = "training/loss-spike", ["train_loader"], 40


def training(wrong):
    torch.manual_seed(48)
    x, y = clusters(100 * 16, spread=1.5)
    if wrong:
        x[40 * 16 : 41 * 16] *= 1000
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    return made(model, optimizer, cross_entropy, (loader, None), 1)


def sick():
    return training(wrong=True)


def healthy():
    return training(wrong=False)
