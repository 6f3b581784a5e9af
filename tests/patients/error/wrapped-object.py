"""A model is wrapped for several cards; its head is then asked of the wrapper."""

from types import SimpleNamespace

from torch import nn

CODE, NAMES = "error/wrapped-object", ("spread", "head", "DataParallel")


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, rows):
        return self.head(rows)


def training(wraps):
    judge = Judge()
    spread = nn.DataParallel(judge) if wraps else judge

    def size():
        return spread.head.weight.norm()

    return SimpleNamespace(trigger=size)


def sick():
    return training(wraps=True)


def healthy():
    return training(wraps=False)
