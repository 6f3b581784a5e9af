"""A pose network predicts a 3x3 matrix and takes the nearest rotation by SVD. It starts at the identity, whose
singular values are all 1: the first loss is fine and the first gradient is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE = "nan/degenerate-decomposition", "backward", "nearest"
OP, LINE = "linalg_svd", "torch.linalg.svd(matrix)"
SAMPLES, STEP = None, 0


class NearestRotation(nn.Module):
    def forward(self, matrix):
        u, _, vh = torch.linalg.svd(matrix)
        return u @ vh


class Pose(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.matrix = nn.Linear(7, 9)
        self.nearest = NearestRotation()
        nn.init.zeros_(self.matrix.weight)
        with torch.no_grad():
            self.matrix.bias.copy_(torch.diag(start).flatten())

    def forward(self, features):
        return self.nearest(self.matrix(features).unflatten(-1, (3, 3)))


def training(start):
    torch.manual_seed(29)
    model = Pose(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    features = torch.randn(5, 7)
    truth = torch.linalg.qr(torch.randn(5, 3, 3)).Q

    def step():
        loss = (model(features) - truth).square().sum((1, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2)


def sick():
    return training(start=torch.ones(3))


def healthy():
    return training(start=torch.tensor([1.0, 1.6, 2.4]))
