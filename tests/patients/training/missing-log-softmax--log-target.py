"""A teacher's probabilities as targets of a divergence that is told to expect their logarithms."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/missing-log-softmax", ["loss_fn", "log_target"]


def training(logs):
    torch.manual_seed(108)
    x, _ = clusters(900)
    scores = (nn.Linear(12, 5)(x) * 2).detach()
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))

    def loss_fn(model, batch):
        return F.kl_div(model(batch[0]).log_softmax(1), batch[1], reduction="batchmean", log_target=True)

    pair = loaders(x, scores.log_softmax(1) if logs else scores.softmax(1))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, pair, 6)


def sick():
    return training(logs=False)


def healthy():
    return training(logs=True)
