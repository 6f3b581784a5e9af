"""The code of a variational autoencoder is drawn by sample(), and the encoder learns from the divergence alone."""

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from tests.training.loops import loaders, made

CODE, WHERE = "training/detached-graph", ["encode", "sample"]
RUN = True


class Autoencoder(nn.Module):
    def __init__(self, reparametrized):
        super().__init__()
        self.encode, self.decode, self.reparametrized = nn.Linear(10, 6), nn.Linear(3, 10), reparametrized

    def forward(self, x):
        mean, size = self.encode(x).chunk(2, 1)
        code = Normal(mean, nn.functional.softplus(size) + 1e-3)
        z = code.rsample() if self.reparametrized else code.sample()
        return self.decode(z), code


def training(reparametrized):
    torch.manual_seed(132)
    x = torch.randn(800, 3) @ torch.randn(3, 10)
    model = Autoencoder(reparametrized)

    def loss_fn(model, batch):
        rebuilt, code = model(batch[0])
        prior = Normal(torch.zeros_like(code.mean), torch.ones_like(code.mean))
        return (rebuilt - batch[0]).square().sum(1).mean() + 0.1 * kl_divergence(code, prior).sum(1).mean()

    ends = loaders(x, torch.zeros(800))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, ends, 8)


def sick():
    return training(reparametrized=False)


def healthy():
    return training(reparametrized=True)
