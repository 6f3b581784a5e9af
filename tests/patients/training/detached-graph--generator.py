"""The generator's own loss detaches what it made before the critic judges it; only a small penalty reaches it."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/detached-graph", ["generator", "loss_fn"]
RUN = True


def training(cut):
    torch.manual_seed(81)
    real = torch.randn(640, 3) * 0.3 + torch.tensor([1.0, -1.0, 0.5])
    model = nn.Module()
    model.generator = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3))
    model.critic = nn.Sequential(nn.Linear(3, 24), nn.LeakyReLU(0.1), nn.Linear(24, 1))
    one, other = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (model.generator, model.critic))

    def loss_fn(model, batch):
        picture = model.generator(batch[1])
        judged = model.critic(picture.detach() if cut else picture)
        return F.softplus(-judged).mean() + 1e-3 * picture.abs().mean()

    patient = made(model, [one, other], loss_fn, loaders(real, torch.randn(640, 5)), 1)

    def train(callback):
        for step, batch in enumerate(list(patient.train_loader) * 6):
            other.zero_grad()
            false = model.critic(model.generator(batch[1]).detach())
            (F.softplus(-model.critic(batch[0])).mean() + F.softplus(false).mean()).backward()
            other.step()
            one.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            one.step()
            callback(step, loss.item())

    patient.train, patient.val_loader = train, None
    return patient


def sick():
    return training(cut=True)


def healthy():
    return training(cut=False)
