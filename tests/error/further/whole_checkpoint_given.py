"""The whole checkpoint is given where its entry with the weights is wanted."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/state-dict-mismatch", "names": ["ckpt", "state_dict"]}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.cls = nn.Linear(5, 5), nn.Linear(5, 2)


def save(model, opt, epoch):
    return {"epoch": epoch, "arch": "resnet50", "state_dict": model.state_dict(), "optimizer": opt.state_dict()}


def build(fixed=False):
    torch.manual_seed(0)
    model = Head()
    opt = torch.optim.Adam(model.parameters())
    ckpt = save(model, opt, 3)

    def trigger():
        fresh = Head()
        if fixed:
            fresh.load_state_dict(ckpt["state_dict"])
        else:
            fresh.load_state_dict(ckpt)

    return SimpleNamespace(trigger=trigger)
