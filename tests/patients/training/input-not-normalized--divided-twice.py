"""Pictures of 0 to 255 are divided by 255 twice: what the network sees is next to nothing."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import cross_entropy, made

CODE, WHERE = "training/input-not-normalized", ["train_loader", "dataset"]
RUN = True


def training(times):
    torch.manual_seed(66)
    kind, typical = torch.randint(0, 4, (640,)), torch.randint(0, 256, (4, 3, 8, 8)).float()
    picture = (typical[kind] + 40 * torch.randn(640, 3, 8, 8)).clamp(0, 255) / 255**times
    data = TensorDataset(picture[:512], kind[:512]), TensorDataset(picture[512:], kind[512:])
    pair = DataLoader(data[0], 32, shuffle=True), DataLoader(data[1], 64)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 4),
    )  # fmt: skip
    return made(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), cross_entropy, pair, 8)


def sick():
    return training(times=2)


def healthy():
    return training(times=1)
