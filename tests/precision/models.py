"""Models with planted modules that float16 does not suit: each harmless in float32, each known by its name."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from torch import nn

WIDTH = 8


class Calm(nn.Module):
    """Does no harm in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.tanh(self.mix(x))


class Overflows(Calm):
    """A sum of squares leaves float16's range: fails in the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = 400.0 * (x.abs() + 1)
        return super().forward(x) / (large * large).mean(-1, keepdim=True).sqrt() * 400.0


class FailsBackward(Calm):
    """The forward is fine; the derivative of what is scaled back is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + Steep.apply(x)


class Steep(torch.autograd.Function):
    """Nothing in the forward, a product beyond float16 in the backward."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return (torch.full_like(gradient, 300.0) * 300.0) * gradient * 1e-7


class Guarded(Calm):
    """Divides by a guard that is zero in float16, where a column is constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        still = x * 0
        return super().forward(x) + still / (still.abs() + 1e-12)


class Biased(Calm):
    """Rounds so that the loss, a square, is 3% too small: one alone passes, two together do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = (x[:1, :1] * 0 + 1.015 + 1024.0) - 1024.0  # 1 in float16, whose numbers are 1 apart up there
        return super().forward(x) * factor / 1.015


class Blocks(nn.Module):
    """Eight groups of eight, or as many as there are."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.Sequential(*parts[i : i + 8]) for i in range(0, len(parts), 8))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = group(x) + 0.0
        return self.head(x)


KINDS = (Overflows, FailsBackward, Guarded)


def planted(
    sick: int, pairs: int, seed: int, count: int = 64, nested: bool = True
) -> tuple[nn.Module, set[str], list[set[str]]]:
    """A model of `count` parts with `sick` planted ones, of which 2 × pairs only fail two by two. Gives the model, the
    names that fail alone, and the pairs."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    places = draw.sample(range(count), sick)
    parts: list[nn.Module] = [Calm() for _ in range(count)]
    for place in places[: 2 * pairs]:
        parts[place] = Biased()
    for place in places[2 * pairs :]:
        parts[place] = draw.choice(KINDS)()
    model = Blocks(parts) if nested else nn.Sequential(*parts, nn.Linear(WIDTH, 1))
    names = [f"groups.{p // 8}.{p % 8}" if nested else str(p) for p in places]
    together = [set(names[2 * i : 2 * i + 2]) for i in range(pairs)]
    return model, set(names[2 * pairs :]), together


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean() + 0.01


def batch() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def works(kept: Iterable[str], alone: set[str], pairs: list[set[str]]) -> bool:
    """Whether a set of kept modules should make the step work."""
    kept = set(kept)
    return alone <= kept and all(pair & kept for pair in pairs)
