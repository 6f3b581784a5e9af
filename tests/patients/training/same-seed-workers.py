"""worker_init_fn seeds NumPy with a constant, so that both workers crop at the same places, in each pass."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.training.loops import cross_entropy, made

CODE, WHERE = "training/same-seed-workers", ["worker_init_fn", "train_loader"]


class Crops(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(72)
        self.label = torch.arange(64) % 2
        self.rows = torch.randn(64, 24, generator=g) + self.label[:, None] * 0.8

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        start = np.random.randint(0, 17)
        return self.rows[i, start : start + 8], self.label[i]


def constant(worker):
    np.random.seed(1234)


def own(worker):
    np.random.seed(torch.initial_seed() % 2**32)


def training(init):
    torch.manual_seed(72)
    loader = DataLoader(
        Crops(), batch_size=8, shuffle=True, num_workers=2, worker_init_fn=init, multiprocessing_context="fork"
    )
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, (loader, None), 2)


def sick():
    return training(constant)


def healthy():
    return training(own)
