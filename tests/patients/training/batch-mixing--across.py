"""A text is cut into rows as it lies, and read down its columns: no word is followed by its successor."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.loops import made

CODE, WHERE = "training/batch-mixing", ["view", "columns"]
TONES, STEPS = 24, 12


class Melody(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.read, self.out = nn.Embedding(TONES, 16), nn.GRU(16, 32), nn.Linear(32, TONES)

    def forward(self, tones):
        return self.out(self.read(self.table(tones))[0])


def in_columns(tones, columns, across):
    rows = len(tones) // columns
    tones = tones[: rows * columns]
    return tones.view(rows, columns) if across else tones.view(columns, rows).t().contiguous()


def training(across):
    torch.manual_seed(131)
    steps = torch.where(torch.rand(9600) < 0.1, torch.randint(0, TONES, (9600,)), 5)
    table = in_columns(steps.cumsum(0) % TONES, 16, across)
    spans = [(table[i : i + STEPS], table[i + 1 : i + 1 + STEPS]) for i in range(0, len(table) - STEPS - 1, STEPS)]
    model = Melody()

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    loaders = DataLoader(spans[:40], batch_size=None, shuffle=True), DataLoader(spans[40:], batch_size=None)
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders, 6)


def sick():
    return training(across=True)


def healthy():
    return training(across=False)
