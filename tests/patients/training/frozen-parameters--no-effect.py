"""Only the gate was to be trained beside a new head, which was frozen with the rest; the gate's scale is still zero."""

import torch
from torch import nn

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/frozen-parameters", ["head", "body"]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.gate = nn.Linear(8, 24), nn.Linear(24, 3), nn.Linear(8, 3)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, x):
        return self.head(self.body(x).relu()) + self.scale * self.gate(x)


def training(frozen):
    torch.manual_seed(64)
    x = torch.randn(600, 8)
    model = Gated()
    if frozen:
        model.requires_grad_(False)
        model.gate.requires_grad_(True)
    rest = [p for p in model.parameters() if p.requires_grad]
    return made(model, torch.optim.Adam(rest, lr=3e-3), cross_entropy, loaders(x, x[:, :3].argmax(1)), 5)


def sick():
    return training(frozen=True)


def healthy():
    return training(frozen=False)
