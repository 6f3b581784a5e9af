"""Two views of each row are joined one beside the other, and the loss takes the row half a batch on for the partner."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.training.loops import made

CODE, WHERE = "training/batch-mixing", ["flatten", "views"]


class Views(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] + 0.3 * torch.randn(2, self.rows.shape[1])


def training(interleaved):
    torch.manual_seed(61)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
    pair = DataLoader(Views(torch.randn(512, 20)), 32, shuffle=True), DataLoader(Views(torch.randn(128, 20)), 32)

    def loss_fn(model, batch):
        z = F.normalize(model(batch.flatten(0, 1) if interleaved else torch.cat(batch.unbind(1))), dim=1)
        n = len(z)
        scores = (z @ z.T / 0.2).masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, (torch.arange(n) + n // 2) % n)

    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss_fn, pair, 8)


def sick():
    return training(interleaved=True)


def healthy():
    return training(interleaved=False)
