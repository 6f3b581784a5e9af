"""The augmentation flips an image and its mask, each by a draw of its own."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.training.loops import loaders, made

CODE, WHERE = "training/label-noise", ["dataset", "target"]


class Flipped(Dataset):
    def __init__(self, pairs, together):
        self.pairs, self.together = pairs, together

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        image, mask = self.pairs[i]
        flip = random.random() < 0.5
        also = flip if self.together else random.random() < 0.5
        return image.flip(-1) if flip else image, mask.flip(-1) if also else mask


def training(together):
    torch.manual_seed(65)
    mask = torch.zeros(240, 1, 8, 8)
    mask[torch.arange(240), 0, :, torch.randint(0, 8, (240,))] = 1.0
    train_loader, val_loader = loaders(mask + 0.3 * torch.randn(mask.shape), mask)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def loss_fn(model, batch):
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    pair = DataLoader(Flipped(train_loader.dataset, together), 16, shuffle=True), val_loader
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, pair, 5)


def sick():
    return training(together=False)


def healthy():
    return training(together=True)
