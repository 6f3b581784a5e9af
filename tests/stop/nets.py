"""Models to stop in."""

from __future__ import annotations

import pathlib
import sys

import torch
from torch import nn

from nbdebug.report import Report
from nbdebug.tools.breakpoints.stop_at import active


class Block(nn.Module):
    """A layer of the user's own, with locals; it starts again from nothing every time."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.fc, self.drop = nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        result = self.drop(hidden).relu() + x
        return result  # noqa: RET504 (a local to look at)


class Net(nn.Module):
    """Blocks, then layers of torch's own, one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(8, 4)


def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = net(x).pow(2).mean()
    loss.backward()
    return loss


def hooks(net: nn.Module) -> int:
    return sum(len(held) for module in net.modules() for key, held in vars(module).items() if key.endswith("_hooks"))


def place(text: str) -> str:
    """Where a line of this file stands, as a report says it."""
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"nets.py, line {1 + next(number for number, line in enumerate(lines) if line.strip().startswith(text))}"


def rows(report: Report, number: int = 0) -> dict[str, list]:
    """One of a record's tables, its rows by name."""
    return {row[0]: row[1:] for row in report.tables[number].rows}


def nothing_left(net: nn.Module) -> bool:
    return not hooks(net) and sys.getprofile() is None and sys.gettrace() in (None, BEFORE) and not active()


BEFORE = sys.gettrace()  # that of a coverage run
