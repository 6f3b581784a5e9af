"""A whole model was pickled, and the file of its class was renamed."""

import sys
from types import ModuleType, SimpleNamespace

import torch

CODE, NAMES = "checkpoint/class-moved", ("old_nets",)


def training(sick):
    module = ModuleType("old_nets")
    exec("from torch import nn\nclass Net(nn.Linear): pass", module.__dict__)
    sys.modules["old_nets"] = module
    model = module.Net(3, 2)

    def make(folder):
        torch.save(model if sick else model.state_dict(), folder / "net.pt")
        del sys.modules["old_nets"]
        return folder / "net.pt"

    return SimpleNamespace(make=make)


def sick():
    return training(True)


def healthy():
    return training(False)
