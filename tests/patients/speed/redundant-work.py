"""A frozen encoder reads the same prompts in every step."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader

CODE, BOTTLENECK, LINE = "speed/redundant-work", "forward", "classes = encoder(prompts)"


def training(once):
    torch.manual_seed(4)
    encoder = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16))
    encoder.requires_grad_(False)
    model, prompts = nn.Linear(8, 16), torch.randn(800, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    known = encoder(prompts)

    def scores(x):
        if once:
            classes = known
        else:
            classes = encoder(prompts)
        return model(x) @ classes.T

    def step(x):
        optimizer.zero_grad()
        loss = scores(x).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()

    return SimpleNamespace(
        model=model, optimizer=optimizer, step=step, loader=DataLoader(torch.randn(80, 8), batch_size=8)
    )


def sick():
    return training(once=False)


def healthy():
    return training(once=True)
