"""The log-probability of the right class is picked by hand, and the minus before it is forgotten."""

import torch
from torch import nn

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/loss-sign", ["loss_fn"]
RUN = True


def training(reversed_):
    torch.manual_seed(95)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))

    def loss_fn(model, batch):
        picked = model(batch[0]).log_softmax(1).gather(1, batch[1][:, None])
        return picked.mean() if reversed_ else -picked.mean()

    pair = loaders(*clusters(800, spread=1.5))
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss_fn, pair, 8)


def sick():
    return training(reversed_=True)


def healthy():
    return training(reversed_=False)
