"""The targets lack their first row, which was read as a heading: each input has the target of the next one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/label-noise", ["train_loader", "dataset", "target"]


def training(headed):
    torch.manual_seed(5)
    x = torch.randn(641, 10)
    y = x[:, :3].sin().sum(1, keepdim=True) + 0.1 * torch.randn(641, 1)
    y = y[:640] if headed else y[1:]
    data = TensorDataset(x[:640], y)
    order = torch.randperm(640).tolist()
    loader = DataLoader(Subset(data, order[:512]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    ends = (loader, DataLoader(Subset(data, order[512:]), batch_size=64))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, ends, 8)


def sick():
    return training(headed=False)


def healthy():
    return training(headed=True)
