"""Faces are told apart by cosines that go into the cross entropy as they are: no score is above one."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import loaders, made

CODE, WHERE = "training/wrong-output-activation", ["cosine_similarity", "normalize", "forward"]


class Faces(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layers, self.scale = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10)), scale
        self.people = nn.Parameter(torch.randn(9, 10))

    def forward(self, x):
        cosines = F.normalize(self.layers(x), dim=-1) @ F.normalize(self.people, dim=-1).t()
        return cosines if self.scale is None else self.scale * cosines


def training(scale):
    torch.manual_seed(86)
    who = torch.randint(0, 9, (700,))
    faces = 2 * torch.randn(9, 12)[who] + 0.7 * torch.randn(700, 12)
    model = Faces(scale)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(faces, who), 6)


def sick():
    return training(scale=None)


def healthy():
    return training(scale=12.0)
