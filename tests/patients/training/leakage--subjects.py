"""Recordings of one patient are on both sides of the split; in the twin each patient is on one."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from tests.training.loops import made

CODE, WHERE = "training/leakage", ["patient", "val_loader"]


class Recordings(Dataset):
    def __init__(self):
        self.patients = torch.arange(30).repeat_interleave(24)
        finding = (torch.arange(30) % 2)[self.patients]
        own = torch.randn(30, 12)[self.patients]
        self.x = own + 0.4 * torch.randn(720, 12) + 1.5 * finding[:, None] * torch.randn(12)
        self.finding = finding

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"signal": self.x[i], "finding": self.finding[i], "patient": f"p{int(self.patients[i])}"}


def training(by_rows):
    torch.manual_seed(63)
    data, order = Recordings(), torch.randperm(720)
    held = order < 144 if by_rows else data.patients < 6
    train_set, val_set = (Subset(data, rows.nonzero().flatten().tolist()) for rows in (~held, held))
    pair = DataLoader(train_set, 32, shuffle=True, generator=torch.Generator().manual_seed(1)), DataLoader(val_set, 64)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["signal"]), batch["finding"])

    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-2), loss_fn, pair, 3)


def sick():
    return training(by_rows=True)


def healthy():
    return training(by_rows=False)
