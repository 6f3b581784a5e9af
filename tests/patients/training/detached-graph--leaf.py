"""Labels in place of scores, made a leaf again so that backward runs: nothing of the model learns."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/detached-graph", ["0.weight", "forward"]


def training(cut):
    torch.manual_seed(91)
    x = torch.randn(400, 6)
    y = (x[:, 0] > 0).float()
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2))

    def loss_fn(model, batch):
        out = model(batch[0])
        guess = out.argmax(1).float().requires_grad_() if cut else out.softmax(1)[:, 1]
        return F.mse_loss(guess, batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, y), 5)


def sick():
    return training(cut=True)


def healthy():
    return training(cut=False)
