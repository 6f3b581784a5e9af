"""Arrows that point to the left, to the right and up are flipped at random, and keep their labels."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.training.loops import cross_entropy, made

CODE, WHERE = "training/label-noise", ["flip", "__getitem__"]


class Arrows(Dataset):
    def __init__(self, count, flips, exchanges):
        self.flips, self.exchanges = flips, exchanges
        self.kind = torch.randint(0, 3, (count,))
        dim = torch.zeros(8, 8)
        dim[2:6, :3] = 1.0
        whole = torch.stack([dim, dim.flip(1), dim.T])
        self.picture = whole[self.kind][:, None] + 0.5 * torch.randn(count, 1, 8, 8)

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, index):
        picture, kind = self.picture[index], self.kind[index]
        if self.flips and torch.rand(()) < 0.5:
            picture = picture.flip(-1)
            kind = 1 - kind if self.exchanges and kind < 2 else kind
        return picture, kind


def training(exchanges):
    torch.manual_seed(65)
    data = Arrows(600, True, exchanges), Arrows(180, False, False)
    pair = DataLoader(data[0], 32, shuffle=True), DataLoader(data[1], 60)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, pair, 8)


def sick():
    return training(exchanges=False)


def healthy():
    return training(exchanges=True)
