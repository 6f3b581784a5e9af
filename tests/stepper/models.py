"""Small models for the stepper, and what shows whether something of a step was left behind."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from torch import nn

from nbdebug.observe.snapshot import Snapshot

THREAD = "nbdebug step_through"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu_(self.up(self.norm(x))))


class Dividing(nn.Module):
    """Makes inf in its own forward, between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.before(x)
        return self.after(scores / (scores - scores))


class Rooting(nn.Module):
    """Sound in the forward; the derivative of sqrt at zero is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + (y - y.detach()).sqrt()


def model(*middle: nn.Module) -> nn.Sequential:
    """0: Linear, 1: Sequential of two blocks and what is given, 2: Linear."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block(), *middle), nn.Linear(8, 1))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)


class Photograph:
    """How a model and the random numbers stand; `left` says what differs."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.snapshot = net, Snapshot.take(net)

    def left(self) -> list[str]:
        hooks = [name for name, m in self.net.named_modules() if m._forward_hooks or m._forward_pre_hooks]
        return self.snapshot.differences() + [f"hook on {name}" for name in hooks] + threads()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def bits(net: nn.Module) -> list[Any]:
    """Everything that a step may have changed."""
    return (
        [t.clone() for t in net.state_dict().values()]
        + [p.grad.clone() for p in net.parameters() if p.grad is not None]
        + [torch.get_rng_state(), random.random()]
    )


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b))
