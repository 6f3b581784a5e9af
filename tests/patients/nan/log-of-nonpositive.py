"""A student network is sharpened step by step with a falling temperature. At the third step the loss is inf: softmax
has rounded some probabilities to zero, and the log comes after it.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/log-of-nonpositive", "forward", "student", "log", "torch.log(torch.softmax("
SAMPLES, STEP = (0, 4), 2


class Student(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.classes = nn.Linear(5, 3)
        self.stable = stable

    def forward(self, x, temperature):
        scores = self.classes(x) / temperature
        if self.stable:
            return torch.log_softmax(scores, -1)
        return torch.log(torch.softmax(scores, -1))


def training(stable):
    torch.manual_seed(5)
    model = nn.ModuleDict({"student": Student(stable)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(7, 5) * 0.1
    x[[0, 4]] *= 30
    with torch.no_grad():
        labels = model["student"].classes(x).argmax(-1)
        labels[[0, 4]] = model["student"].classes(x[[0, 4]]).argmin(-1)
    temperatures = iter([1.0, 0.1, 0.01, 0.01])

    def step():
        optimizer.zero_grad()
        log_p = model["student"](x, next(temperatures))
        loss = -log_p.gather(1, labels[:, None]).mean()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=4)


def sick():
    return training(stable=False)


def healthy():
    return training(stable=True)
