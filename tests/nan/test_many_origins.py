"""Masks put an infinity into every layer of every step: a fault after thousands of them is named like any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.tools.nan.probe import Probe


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        scores = (self.lin(x) @ x.transpose(1, 2)).masked_fill(later, float("-inf"))
        return x + 0.1 * scores.softmax(-1) @ x


def training(layers: int, steps: int):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    count = iter(range(steps))

    def step():
        level = torch.ones(4)
        level[2] = 0.0 if next(count) == steps - 1 else 1.0
        size = model(torch.randn(4, 5, 8)).abs().mean((1, 2))
        loss = torch.log(level * size).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


@pytest.mark.parametrize("strategy", ["trace", "replay"])
@pytest.mark.parametrize(("layers", "steps"), [(80, 1), (4, 40)])
def test_masks_of_many_layers_and_steps_hide_no_fault(layers, steps, strategy):
    model, optimizer, step = training(layers, steps)
    report = nbdebug.nan_trace(step, model=model, optimizer=optimizer, max_steps=steps, strategy=strategy)
    where = report.findings[0].where
    assert (report.findings[0].code, where.op, where.step, where.samples) == (
        "nan/log-of-nonpositive",
        "log",
        steps - 1,
        (2,),
    )


def test_the_origins_of_earlier_steps_are_forgotten():
    model, optimizer, step = training(4, 1000)
    probe = Probe({"model": model}, {"optimizer": optimizer})
    counts = []
    with probe:
        for n in range(20):
            probe.begin_step(n)
            assert probe.end_step(step()) is None
            counts.append(len(probe.taint.origins))
    assert max(counts) <= 2 * counts[0], f"origins pile up: {counts}"
