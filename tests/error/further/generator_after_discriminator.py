"""The discriminator's backward frees the generator's graph, which the generator's loss needs."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/backward-twice", "names": ["fake"]}


def build(fixed=False):
    torch.manual_seed(0)
    netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizerD, optimizerG = torch.optim.Adam(netD.parameters(), 2e-4), torch.optim.Adam(netG.parameters(), 2e-4)
    criterion = nn.BCEWithLogitsLoss()

    def trigger():
        for _i, real in enumerate([torch.rand(6, 8) for _ in range(2)]):
            b = real.size(0)
            netD.zero_grad()
            errD_real = criterion(netD(real), torch.ones(b, 1))
            errD_real.backward()
            noise = torch.randn(b, 4)
            fake = netG(noise)
            out = netD(fake.detach() if fixed else fake)
            errD_fake = criterion(out, torch.zeros(b, 1))
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(b, 1))
            errG.backward()
            optimizerG.step()

    return SimpleNamespace(trigger=trigger)
