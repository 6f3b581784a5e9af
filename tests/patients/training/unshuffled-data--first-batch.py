"""Each step begins a new pass over a loader that does not shuffle: it gives its first batch again and again."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import clusters, cross_entropy, made

CODE, WHERE = "training/unshuffled-data", ["train_loader", "iter"]


def training(begun_anew):
    torch.manual_seed(94)
    x, label = clusters(600, spread=3.0)
    train_loader = DataLoader(TensorDataset(x[:480], label[:480]), batch_size=24)
    val_loader = DataLoader(TensorDataset(x[480:], label[480:]), batch_size=60)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    case = made(model, optimizer, cross_entropy, (train_loader, val_loader), 1)

    def endless():
        while True:
            yield from train_loader

    def train(callback):
        batches = endless()
        for step in range(120):
            batch = next(iter(train_loader) if begun_anew else batches)
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    case.train = train
    return case


def sick():
    return training(begun_anew=True)


def healthy():
    return training(begun_anew=False)
