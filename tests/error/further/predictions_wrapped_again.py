"""The net's predictions are wrapped in a new tensor before the loss."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/no-grad-path", "names": ["preds", "torch.tensor"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.ModuleList([nn.Linear(3, 8), nn.Linear(8, 8)]), nn.Linear(8, 1)

    def forward(self, x):
        for h in self.hidden:
            x = torch.tanh(h(x))
        return self.out(x)


def build(fixed=False):
    torch.manual_seed(0)
    net = Net()
    optim = torch.optim.RMSprop(net.parameters())

    def trigger():
        for x, y in zip(torch.rand(3, 4, 3), torch.rand(3, 4)):
            if fixed:
                preds = torch.cat([net(row[None]) for row in x])
            else:
                preds = torch.tensor([net(row[None]) for row in x])
            loss = nn.functional.mse_loss(preds.flatten(), y)
            optim.zero_grad()
            loss.backward()
            optim.step()

    return SimpleNamespace(trigger=trigger)
