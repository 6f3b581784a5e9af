"""The validation forgets eval(): dropout of a half is on while the validation loss is computed."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made, plainly

CODE, WHERE = "training/train-mode-in-eval", ["validate"]


def training(switch):
    torch.manual_seed(45)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ns = made(model, optimizer, cross_entropy, loaders(*clusters(800, spread=2.0)), 1)

    def validate():
        if switch:
            model.eval()
        with torch.no_grad():
            return sum(cross_entropy(model, batch).item() for batch in ns.val_loader)

    ns.train = plainly(model, optimizer, cross_entropy, ns.train_loader, 6, validate=validate)
    return ns


def sick():
    return training(switch=False)


def healthy():
    return training(switch=True)
