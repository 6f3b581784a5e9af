"""The drawn frequencies of a layer are a plain attribute: a loaded model has others."""

import pathlib
from types import SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "checkpoint/buffer-not-registered", ("waves.pt", "net.0.frequencies")


class Waves(nn.Module):
    def __init__(self, kept):
        super().__init__()
        drawn = torch.randn(3, 8)
        if kept:
            self.register_buffer("frequencies", drawn)
        else:
            self.frequencies = drawn

    def forward(self, rows):
        return torch.cos(rows @ self.frequencies)


def training(kept):
    rows = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(1))

    def fresh(seed):
        torch.manual_seed(seed)
        return nn.Sequential(Waves(kept), nn.Linear(8, 1))

    def train(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in rows[:8]:
            optimizer.zero_grad()
            (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        return net

    def answers(net):
        with torch.no_grad():
            return net.eval()(rows[8]).flatten().tolist()

    def make(folder: pathlib.Path):
        torch.save(train(fresh(0)).state_dict(), folder / "waves.pt")
        return folder / "waves.pt"

    def resumed(path):
        net = fresh(1)
        net.load_state_dict(torch.load(path))
        return answers(net)

    return SimpleNamespace(make=make, resumed=resumed, uninterrupted=lambda: answers(train(fresh(0))))


def sick():
    return training(False)


def healthy():
    return training(True)
