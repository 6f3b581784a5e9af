"""All validation rows are predicted after every step."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, BOTTLENECK, LINE = "speed/eval-too-often", "rest", "curve.append(validate())"


def training(every):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 96), nn.Tanh(), nn.Linear(96, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows, x, curve, steps = torch.randn(4000, 20), torch.randn(8, 20), [], []

    @torch.no_grad()
    def validate():
        model.eval()
        loss = torch.stack([model(part).square().mean() for part in rows.split(250)]).mean()
        model.train()
        return loss

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        steps.append(1)
        if len(steps) % every == 0:
            curve.append(validate())

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def sick():
    return training(every=1)


def healthy():
    return training(every=100)
