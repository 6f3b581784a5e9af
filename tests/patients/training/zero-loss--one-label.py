"""The discriminator is told that what is generated is real, too: both losses go to zero, and nobody learns."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CODE, WHERE, RUN = "training/zero-loss", ["label", "discriminator"], True


def training(label):
    torch.manual_seed(69)
    maker, judge = (
        nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)),
        nn.Sequential(nn.Linear(2, 16), nn.ReLU()),
    )
    judge.append(nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(m.parameters(), 2e-3) for m in (maker, judge)]
    loader = DataLoader(TensorDataset(torch.randn(320, 2) * 0.3 + 2), 32, shuffle=True)
    loss = nn.BCEWithLogitsLoss()

    def train(callback):
        for step, (real,) in enumerate(batch for _ in range(6) for batch in loader):
            made, ones = maker(torch.randn(len(real), 3)), torch.ones(len(real), 1)
            optimizers[1].zero_grad()
            (loss(judge(real), ones) + loss(judge(made.detach()), label * ones)).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            fooled = loss(judge(made), ones)
            fooled.backward()
            optimizers[0].step()
            callback(step, fooled.item())

    model = nn.ModuleDict({"maker": maker, "judge": judge})
    parts = {"train_loader": loader, "val_loader": None, "scheduler": None, "loss_fn": None}
    return SimpleNamespace(model=model, optimizer=optimizers, train=train, **parts)


def sick():
    return training(label=1)


def healthy():
    return training(label=0)
