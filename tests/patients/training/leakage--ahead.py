"""A small language model: its layer is given no mask, so that each place sees the token that it is to predict."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/leakage", ["mix", "forward", "mask"]


class Tokens(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.token, self.place = nn.Embedding(9, 24), nn.Parameter(0.1 * torch.randn(10, 24))
        self.mix = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(24, 9)
        self.mask = nn.Transformer.generate_square_subsequent_mask(10) if causal else None

    def forward(self, x):
        return self.out(self.mix(self.token(x) + self.place, src_mask=self.mask))


def training(causal):
    torch.manual_seed(56)
    text = torch.randint(0, 9, (300, 11))
    for t in range(1, 11):
        text[:, t] = torch.where(torch.rand(300) < 0.7, (text[:, t - 1] + 4) % 9, text[:, t])
    model = Tokens(causal)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    pair = loaders(text[:, :-1], text[:, 1:])
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, pair, 5)


def sick():
    return training(causal=False)


def healthy():
    return training(causal=True)
