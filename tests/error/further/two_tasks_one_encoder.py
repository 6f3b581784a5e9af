"""Two tasks share an encoder and call backward one after the other."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/backward-twice", "names": ["feats"]}


class MTL(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, 6, 3), nn.ReLU())
        self.tasks = nn.ModuleDict({"depth": nn.Linear(6, 1), "seg": nn.Linear(6, 4)})

    def forward(self, x):
        return self.enc(x).mean(-1)


def build(fixed=False):
    torch.manual_seed(0)
    mtl = MTL()
    opt = torch.optim.Adam(mtl.parameters())

    def train_step(x, targets):
        feats = mtl(x)
        opt.zero_grad()
        logs, losses = {}, []
        for name, head in mtl.tasks.items():
            out = head(feats)
            loss = (out - targets[name]).pow(2).mean()
            if fixed:
                losses.append(loss)
            else:
                loss.backward()
            logs[name] = loss.item()
        if fixed:
            sum(losses).backward()
        opt.step()
        return logs

    wanted = {"depth": torch.rand(3, 1), "seg": torch.rand(3, 4)}
    return SimpleNamespace(trigger=lambda: train_step(torch.rand(3, 2, 12), wanted))
