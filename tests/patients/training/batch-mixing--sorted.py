"""The model sorts the sequences of a batch by their length, and gives its outputs in that order."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.loops import made

CODE, WHERE = "training/batch-mixing", ["forward"]


class Longest(nn.Module):
    def __init__(self, puts_back):
        super().__init__()
        self.mix, self.out, self.puts_back = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 3), puts_back

    def forward(self, x, length):
        length, order = length.sort(descending=True)
        rows = nn.utils.rnn.pack_padded_sequence(x[order], length, batch_first=True)
        out = self.out(self.mix(rows)[1][0])
        return out[order.argsort()] if self.puts_back else out


def training(puts_back):
    torch.manual_seed(96)
    y, model = torch.randint(0, 3, (320,)), Longest(puts_back)
    x, length = torch.randn(320, 8, 2) + y[:, None, None], torch.randint(3, 9, (320,))
    rows = [*zip(x, length, y)]
    pair = DataLoader(rows[:256], 32, shuffle=True), DataLoader(rows[256:], 32)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(*batch[:2]), batch[2])

    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, pair, 5)


def sick():
    return training(puts_back=False)


def healthy():
    return training(puts_back=True)
