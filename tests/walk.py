"""Which of our files a question runs through, from magic to HTML: `python -m tests.walk nan_trace mem [--functions]`.

This is the walk that a newcomer makes to understand an answer; `tests/test_architecture.py` keeps it short.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import nbdebug
from tests.shell import started

SETUP = """
import torch
from torch import nn
import nbdebug
torch.manual_seed(0)
class Attention(nn.Module):
    def forward(self, x, mask):
        scores = x @ x.transpose(1, 2)
        scores = scores.masked_fill(mask[:, None, :], float("-inf"))
        return scores.softmax(-1) @ x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.fc = nn.Linear(8, 2)
    def forward(self, x, mask):
        return self.fc(self.attention(x, mask).mean(1))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(4, 5, 8), torch.tensor([0, 1, 0, 1])
mask = torch.zeros(4, 5, dtype=torch.bool)
bad = mask.clone()
bad[3] = True
def step(mask):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, mask), y)
    loss.backward()
    optimizer.step()
    return loss
"""
QUESTIONS = {
    "nan_trace": ["%nan_trace step(bad)"],
    "explain": ["nn.Linear(1024, 10)(torch.randn(16, 1568))", "%explain"],
    "grad_watch": ["%grad_watch on", "for _ in range(5): step(mask)", "%grad_watch off"],
    "mem": ["%mem"],
    "bottleneck": ["%bottleneck step(mask)"],
    "guard": ["%guard on", "for m in (mask, mask, bad): step(m)", "%guard"],
}
"""What is typed, cell by cell. `explain`: the first cell fails before the walk begins."""


def walk(question: str) -> dict[str, set[str]]:
    """Each of our files in which code ran while the question was answered and its report drawn, and the functions."""
    ran: dict[str, set[str]] = defaultdict(set)
    package = os.path.dirname(nbdebug.__file__) + os.sep

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name != "<module>":
            ran[code.co_filename[len(package) :]].add(code.co_name)

    cells = QUESTIONS[question]
    with started(SETUP) as book:
        if question == "explain":
            book.run(cells[0])
            cells = cells[1:]
        sys.setprofile(profile)
        try:
            for cell in cells:
                report = book.run(cell).result
            report._repr_mimebundle_()
        finally:
            sys.setprofile(None)
    return dict(ran)


def show(question: str) -> None:
    files = walk(question)
    print(f"{question}:")
    for file, functions in sorted(files.items()):
        print(" ", file, *(sorted(functions) if "--functions" in sys.argv else ()))
    print(" ", len(files), "files,", sum(map(len, files.values())), "functions", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if not name.startswith("--"):  # each in a process of its own: nothing is loaded or cached yet
            process = multiprocessing.get_context("fork").Process(target=show, args=(name,))
            process.start()
            process.join()
