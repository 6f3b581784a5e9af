"""The parts of a loss are summed up as numbers and made a tensor again."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/no-grad-path", "names": ["total", "item"]}


def build(fixed=False):
    torch.manual_seed(0)
    net = nn.ModuleDict({"trunk": nn.Linear(6, 8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 3)})
    opt = torch.optim.SGD(net.parameters(), 0.1)
    w = {"a": 1.0, "b": 0.5}

    def losses(x, ya, yb):
        h = torch.relu(net["trunk"](x))
        return {"a": nn.functional.mse_loss(net["a"](h)[:, 0], ya), "b": nn.functional.cross_entropy(net["b"](h), yb)}

    def step(x, ya, yb):
        parts = losses(x, ya, yb)
        if fixed:
            total = sum(w[k] * v for k, v in parts.items())
        else:
            total = torch.tensor(sum(w[k] * v.item() for k, v in parts.items()))
        opt.zero_grad()
        total.backward()
        opt.step()
        return total

    return SimpleNamespace(trigger=lambda: step(torch.rand(4, 6), torch.rand(4), torch.tensor([0, 1, 2, 0])))
