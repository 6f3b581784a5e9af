"""Each round has a model and an optimizer of its own; a table of schedulers keeps every optimizer, with its state."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/cache-unbounded", ["plans"], "plans[len(plans)] ="


def rounds(numbers):
    torch.manual_seed(4)
    plans = {}

    def step():
        model = nn.Linear(200, 200)
        optimizer = torch.optim.AdamW(model.parameters())
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
        plan.step()
        plans[len(plans)] = plan.get_last_lr() if numbers else plan

    return SimpleNamespace(model=None, optimizer=None, step=step, steps=3, names={"plans": plans})


def sick():
    return rounds(numbers=False)


def healthy():
    return rounds(numbers=True)
