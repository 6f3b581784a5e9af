"""A mean over all processes in a program that was started without any."""

from types import SimpleNamespace

import torch
import torch.distributed

CODE, NAMES = "error/nccl", ("init_process_group", "total")


def training(alone):
    def average():
        total = torch.ones(3)
        if not alone or torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return total

    return SimpleNamespace(trigger=average)


def sick():
    return training(alone=False)


def healthy():
    return training(alone=True)
