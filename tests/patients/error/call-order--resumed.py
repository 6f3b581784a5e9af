"""A schedule goes on at epoch 9, and no schedule was made for this optimizer before."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/call-order", ("CosineAnnealingLR", "initial_lr", "last_epoch")


def training(known):
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)

    def resume():
        for group in optimizer.param_groups if known else ():
            group["initial_lr"] = 0.1
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, last_epoch=9).get_last_lr()

    return SimpleNamespace(trigger=resume)


def sick():
    return training(known=False)


def healthy():
    return training(known=True)
