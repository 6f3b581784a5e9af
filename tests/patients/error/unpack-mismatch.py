"""The data set gives a weight beside each sample and label; the loop has two names."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CODE, NAMES = "error/unpack-mismatch", ("meals",)


def training(weighted):
    torch.manual_seed(0)
    columns = [torch.rand(9, 4), torch.randint(3, (9,)), torch.rand(9)]
    meals, net = DataLoader(TensorDataset(*columns[: 2 + weighted]), batch_size=3), nn.Linear(4, 3)

    def total():
        losses = []
        for rows, labels in meals:
            losses.append(nn.functional.cross_entropy(net(rows), labels).item())
        return losses

    return SimpleNamespace(trigger=total)


def sick():
    return training(weighted=True)


def healthy():
    return training(weighted=False)
