"""The padding mask of attention is the wrong way round: it sees the padding, and hides the words."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/inverted-mask", ["attend", "forward"]


class Words(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.words, self.first = nn.Embedding(20, 16, padding_idx=0), nn.Parameter(torch.randn(1, 1, 16))
        self.attend, self.out, self.hidden = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 2), hidden

    def forward(self, x):
        h = torch.cat([self.first.expand(len(x), -1, -1), self.words(x)], 1)
        mask = torch.cat([torch.zeros(len(x), 1, dtype=torch.bool), (x == 0) == self.hidden], 1)
        return self.out(self.attend(h, h, h, key_padding_mask=mask)[0][:, 0])


def training(hidden):
    torch.manual_seed(67)
    x, y = torch.randint(3, 20, (400, 9)), torch.randint(0, 2, (400,))
    x[:, 0] = 1 + y
    x[torch.arange(9) >= torch.randint(2, 7, (400, 1))] = 0
    model = Words(hidden)
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), cross_entropy, loaders(x, y), 8)


def sick():
    return training(hidden=False)


def healthy():
    return training(hidden=True)
