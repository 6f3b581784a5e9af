"""A second model is trained with the early stopper of the first one, whose patience is all but used up."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/shared-object", 4, ["stopper", "stopper.best"]
STOPPER = """class Patience:
    def __init__(self, rounds=2):
        self.rounds, self.best, self.worse = rounds, float("inf"), 0

    def over(self, value):
        self.worse = 0 if value < self.best else self.worse + 1
        self.best = min(value, self.best)
        return self.worse > self.rounds"""
TRAIN = """for epoch in range(9):
    optimizer.zero_grad()
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if stopper.over(loss.item()):
        break"""
SMALL, WIDE = (
    f"net = {text}\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)"
    for text in ("nn.Linear(3, 1)", "nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))")
)


def notebook(start, again):
    setup = f"import torch\nfrom torch import nn\ntorch.manual_seed(0)\nx = torch.randn(20, 3)\n{STOPPER}"
    return SimpleNamespace(cells=[f"{setup}\n{start}", SMALL, again + TRAIN, WIDE, again + TRAIN])


def sick():
    return notebook("stopper = Patience()", "")


def healthy():
    return notebook("", "stopper = Patience()\n")
