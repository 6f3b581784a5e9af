"""The first state is made for the full batch; the last batch is smaller."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EXPECT = {"code": "error/shape-mismatch", "names": ["rnn", "h0"]}


class Model(nn.Module):
    def __init__(self, bs):
        super().__init__()
        self.rnn, self.fc, self.bs = nn.GRU(3, 6, 2, batch_first=True), nn.Linear(6, 1), bs

    def forward(self, x):
        h0 = torch.zeros(2, self.bs or x.size(0), 6)
        out, _ = self.rnn(x, h0)
        return self.fc(out[:, -1])


def build(fixed=False):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.rand(22, 5, 3), torch.rand(22, 1)), batch_size=8)
    model = Model(None if fixed else 8)

    def epoch():
        for _i, (xb, yb) in enumerate(loader):
            nn.functional.mse_loss(model(xb), yb).backward()

    return SimpleNamespace(trigger=epoch)
