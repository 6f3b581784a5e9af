"""Each text is split into letters and counted in Python, whenever it is asked for."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CODE, BOTTLENECK, LINE = "speed/loader-bound", "loader", "counts[ord(letter) - 97] += 1"


class Letters(Dataset):
    def __init__(self, once):
        self.texts = ["abcxyz" * 5_000] * 48
        self.ready = [self.counted(text) for text in self.texts] if once else None

    def __len__(self):
        return 48

    def counted(self, text):
        counts = [0.0] * 26
        for letter in text:
            counts[ord(letter) - 97] += 1
        return torch.tensor(counts) / len(text)

    def __getitem__(self, index):
        return self.ready[index] if self.ready else self.counted(self.texts[index])


def training(once):
    torch.manual_seed(1)
    model = nn.Linear(26, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, loader=DataLoader(Letters(once), batch_size=6))


def sick():
    return training(once=False)


def healthy():
    return training(once=True)
