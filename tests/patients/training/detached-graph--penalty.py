"""The encoder is cut off by a detach, and a penalty on all weights still gives each of them a gradient."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, loaders, made

CODE, WHERE = "training/detached-graph", ["encoder", "forward"]
RUN = True


class Probe(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 6))
        self.head, self.cut = nn.Linear(6, 5), cut

    def forward(self, x):
        code = self.encoder(x)
        return self.head(torch.relu(code.detach() if self.cut else code))


def loss_fn(model, batch):
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-4 * penalty


def training(cut):
    torch.manual_seed(82)
    model = Probe(cut)
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(*clusters(600, spread=2.0)), 2)


def sick():
    return training(cut=True)


def healthy():
    return training(cut=False)
