"""The models that `fit` is judged on: an MLP, a ResNet-like CNN and GPT-2 124M, each with its batch and its loss."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, VOCABULARY = 768, 1024, 50257


class MLP(nn.Module):
    """Four wide layers."""

    def __init__(self, given: int = 1024, width: int = 4096, classes: int = 1000):
        super().__init__()
        sizes = [given, width, width, width]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm around a shortcut."""

    def __init__(self, given: int, made: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(made)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(made)
        self.shortcut = (
            nn.Sequential()
            if given == made
            else nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class CNN(nn.Module):
    """The layout of ResNet-18."""

    def __init__(self, width: int = 64, classes: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        made = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        self.blocks = nn.Sequential(*(Residual(a, b, 1 if a == b else 2) for a, b in zip([width, *made], made)))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder like GPT-2 124M; the head shares the embedding's weight. checkpointed: its blocks are."""

    def __init__(
        self,
        *,
        layers: int = 12,
        width: int = WIDTH,
        heads: int = 12,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        dropout: float = 0.0,
        checkpointed: bool = False,
    ):
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def vectors(rows: int) -> Any:
    return torch.randn(rows, 1024), torch.randint(1000, (rows,))


def images(rows: int, side: int = 224) -> Any:
    return torch.randn(rows, 3, side, side), torch.randint(1000, (rows,))


def tokens(rows: int, length: int = LENGTH) -> Any:
    return torch.randint(VOCABULARY, (rows, length + 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. half: the loss is computed under bfloat16 autocast; optimizer: makes one from parameters."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    half: bool = False
    within: float = 0.01

    def loss_fn(self, model: nn.Module, batch: Any) -> torch.Tensor:
        device = next(model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.half):
            return self.loss(model, batch)


adamw = functools.partial(torch.optim.AdamW, lr=1e-4)
sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
KINDS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., torch.Tensor], bool, tuple[int, ...], float]
] = {
    "MLP fp32": (MLP, vectors, classified, False, (512, 8192), 0.01),
    "CNN fp32": (CNN, images, classified, False, (32, 64), 0.03),
    "CNN bf16": (CNN, images, classified, True, (32, 64), 0.03),
    "GPT-2 fp32": (GPT, tokens, next_token, False, (4, 8), 0.01),
    "GPT-2 bf16": (GPT, tokens, next_token, True, (8, 16), 0.01),
    "GPT-2 bf16 checkpointed": (functools.partial(GPT, checkpointed=True), tokens, next_token, True, (8, 16), 0.01),
    "GPT-2 bf16 dropout": (functools.partial(GPT, dropout=0.1), tokens, next_token, True, (8,), 0.01),
}


def cases() -> list[Case]:
    """All rows: each model at each of its batch sizes, with AdamW and with SGD."""
    return [
        Case(f"{kind} {rows} {name}", build, functools.partial(batch, rows), loss, optimizer, half, within)
        for kind, (build, batch, loss, half, sizes, within) in KINDS.items()
        for rows in sizes
        for name, optimizer in (("AdamW", adamw), ("SGD", sgd))
    ]
