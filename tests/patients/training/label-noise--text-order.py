"""Files are listed in the order of their names as text (1, 10, 100, 2), and the targets in that of their numbers: the
network learns each by heart."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/label-noise", ["train_loader", "dataset", "labels"]


def training(by_number):
    torch.manual_seed(3)
    names = [f"recording_{n}.wav" for n in range(1, 601)]
    labels = torch.randint(0, 3, (600,))
    recordings = {name: torch.randn(12) + 2 * nn.functional.one_hot(label, 12) for name, label in zip(names, labels)}
    names = names if by_number else sorted(names)
    data = TensorDataset(torch.stack([recordings[name] for name in names]), labels)
    order = torch.randperm(600).tolist()
    loader = DataLoader(Subset(data, order[:500]), batch_size=25, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 3))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    ends = (loader, DataLoader(Subset(data, order[500:]), batch_size=50))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, ends, 8)


def sick():
    return training(by_number=False)


def healthy():
    return training(by_number=True)
