"""Validation is one season of the year, and is standardized by its own mean and deviation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/preprocessing-mismatch", ["val_loader", "mean"]
RUN = True


def training(own):
    torch.manual_seed(8)
    warmth = torch.cat([torch.rand(800) * 30 - 5, torch.rand(160) * 8 + 18])[:, None]
    x = torch.cat([warmth, torch.randn(960, 2)], 1)
    y = (nn.functional.relu(14 - warmth) + 1.5 * nn.functional.relu(warmth - 20)) / 5 + 0.3 * x[:, 1:2]
    mean, std = x[:800].mean(0), x[:800].std(0)
    val = x[800:]
    val = (val - val.mean(0)) / val.std(0) if own else (val - mean) / std
    train_set = TensorDataset((x[:800] - mean) / std, y[:800])
    model = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 1))

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    pair = DataLoader(train_set, batch_size=50, shuffle=True), DataLoader(TensorDataset(val, y[800:]), batch_size=80)
    return made(model, torch.optim.Adam(model.parameters(), lr=0.01), loss_fn, pair, 16)


def sick():
    return training(own=True)


def healthy():
    return training(own=False)
