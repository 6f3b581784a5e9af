"""A later part of a series is validation, and is standardized by its own mean and deviation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/preprocessing-mismatch", ["val_loader", "mean"]


def training(own):
    torch.manual_seed(8)
    level = torch.cat([torch.linspace(0, 6, 600), torch.full((160,), 6.0)])[:, None]
    x = level + torch.randn(760, 4) * torch.tensor([1.0, 0.5, 0.3, 0.2])
    y = x[:, :2].sum(1, keepdim=True).sin() + 0.2 * x.mean(1, keepdim=True)
    mean, std = x[:600].mean(0), x[:600].std(0)
    val = x[600:]
    val = (val - val.mean(0)) / val.std(0) if own else (val - mean) / std
    train_set = TensorDataset((x[:600] - mean) / std, y[:600])
    model = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 1))

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    pair = DataLoader(train_set, batch_size=50, shuffle=True), DataLoader(TensorDataset(val, y[600:]), batch_size=80)
    return made(model, torch.optim.Adam(model.parameters(), lr=0.01), loss_fn, pair, 16)


def sick():
    return training(own=True)


def healthy():
    return training(own=False)
