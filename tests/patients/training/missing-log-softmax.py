"""The model returns probabilities, and the loss is nll_loss: no lower than minus one, with next to no slope."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/missing-log-softmax", ["nll_loss", "loss_fn", "forward"]


def training(last):
    torch.manual_seed(64)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5), last)

    def loss_fn(model, batch):
        return F.nll_loss(model(batch[0]), batch[1])

    return made(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, loaders(*clusters(700)), 5)


def sick():
    return training(nn.Softmax(dim=1))


def healthy():
    return training(nn.LogSoftmax(dim=1))
