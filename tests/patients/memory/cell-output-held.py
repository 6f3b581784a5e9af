"""A cell that ends in a tensor is run again and again: the shell files each of them."""

from types import SimpleNamespace

import torch

CODE, HOLDER, LINE = "memory/cell-output-held", ["Out"], None


def notebook(show):
    user_ns = {"Out": {}}

    def step():
        value = torch.rand(64, 1024)
        shown = value if show else tuple(value.shape)
        user_ns["Out"][len(user_ns["Out"]) + 1] = shown

    return SimpleNamespace(model=None, optimizer=None, step=step, steps=3, names=user_ns)


def sick():
    return notebook(show=True)


def healthy():
    return notebook(show=False)
