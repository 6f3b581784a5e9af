"""A training is run again with a new cosine schedule, and the optimizer still has the rate that the first left: 0."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/cell-run-twice", 3, ["optimizer", "schedule"]
OPTIMIZER = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
TRAIN = """schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
for _ in range(5):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
    schedule.step()"""


def notebook(again):
    setup = "import torch\nx = torch.randn(16, 3)\nnet = torch.nn.Linear(3, 1)"
    return SimpleNamespace(cells=[setup, OPTIMIZER, TRAIN, again + TRAIN])


def sick():
    return notebook("")


def healthy():
    return notebook(OPTIMIZER)
