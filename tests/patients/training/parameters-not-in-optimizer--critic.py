"""A critic shapes what an autoencoder makes, and is in no optimizer; its own loss is cut off from the autoencoder."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, loaders, made

CODE, WHERE, RUN = "training/parameters-not-in-optimizer", ["critic"], True


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))
        self.critic = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.maker(x)


def loss_fn(model, batch):
    x = batch[0]
    made_up = model(x)
    real, fake = model.critic(x), model.critic(made_up.detach())
    judged = F.softplus(-real).mean() + F.softplus(fake).mean()
    for p in model.critic.parameters():
        p.requires_grad_(False)
    fooled = F.softplus(-model.critic(made_up)).mean()
    for p in model.critic.parameters():
        p.requires_grad_(True)
    return F.mse_loss(made_up, x) + 0.05 * fooled + judged


def training(whole):
    torch.manual_seed(62)
    model = Pair()
    trained = model if whole else model.maker
    optimizer = torch.optim.Adam(trained.parameters(), lr=2e-3)
    return made(model, optimizer, loss_fn, loaders(*clusters(600)), 4)


def sick():
    return training(whole=False)


def healthy():
    return training(whole=True)
