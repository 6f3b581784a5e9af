"""A small training, healthy or sick, for tests that look at what a trace leaves behind."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn


def small(sick: bool = False, **more) -> SimpleNamespace:
    """A model, an optimizer and a step; a sick one takes the logarithm of zero in the second row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = torch.tensor([1.0, 0.0 if sick else 1.0, 1.0, 1.0, 1.0])

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        level = (model(torch.randn(5, 3)).squeeze(-1).square() + 0.1) * scale
        loss = torch.log(level).mean()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, **more)
