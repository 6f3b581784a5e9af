"""The optimizer's cell is run again for a fresh start; the scheduler goes on turning the old one's learning rate."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/stale-reference", 4, ["schedule", "adam"]
ADAM = "adam = torch.optim.Adam([weight], lr=0.1)"
SCHEDULE = "schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)"
STEP = (
    "for _ in range(2):\n    adam.zero_grad()\n    weight.square().sum().backward()\n    adam.step()\n"
    "    schedule.step()"
)


def notebook(again):
    return SimpleNamespace(
        cells=["import torch\nweight = torch.nn.Parameter(torch.ones(4))", ADAM, SCHEDULE, STEP, ADAM, again, STEP]
    )


def sick():
    return notebook("weight.data.fill_(1.0);")


def healthy():
    return notebook(SCHEDULE)
