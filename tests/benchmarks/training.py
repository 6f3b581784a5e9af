"""A GPT-like model, its training step, and two faults that can be planted in its middle block.

Both faults are common ones. Some rows of a batch hold nothing but padding; `Gate` divides by what such a row adds up
to. With `by = "sum"` that is 0/0 in the forward. With `by = "length"` the division is guarded and the forward finite,
but the derivative of a square root at zero is not. The gate's size and the ops around it are the same, planted or not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS = 8
PADDED_ROW = 3


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the model and its batch are, and how it is trained."""

    blocks: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    half: bool  # bfloat16 autocast
    fused: bool  # AdamW in one kernel, as on a card; else torch's choice

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks, width {self.width}, {self.heads} heads, vocabulary {self.vocabulary:,}, "
            f"batch {self.batch}×{self.length}, {'bfloat16 autocast' if self.half else 'float32'}, "
            f"{'fused ' if self.fused else ''}AdamW"
        )


SIZES = {
    "smallest": Size(2, 32, 2, 64, 4, 8, True, False),
    "small": Size(4, 256, 4, 1000, 8, 64, False, False),
    "gpt2": Size(12, 768, 12, 50257, 8, 1024, True, True),
}


class Planted(NamedTuple):
    """What a right answer says of a planted fault."""

    code: str
    module: str
    text: str
    samples: tuple[int, ...]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Gate(nn.Module):
    """How much each expert is listened to, at each position; rows of padding (`keep` is 0) ask for none."""

    def __init__(self, width: int):
        super().__init__()
        self.rate, self.by = nn.Linear(width, EXPERTS), "sum"

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        asked = F.softplus(self.rate(x)) * keep
        if self.by == "sum":
            return asked / asked.sum(-1, keepdim=True)
        length = asked.pow(2).sum(-1, keepdim=True).sqrt()
        return asked / (length + 1e-6)


class Block(nn.Module):
    def __init__(self, size: Size, gated: bool):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.width), Attention(size.width, size.heads)
        self.norm2 = nn.LayerNorm(size.width)
        wide = 4 * size.width
        self.mlp = nn.Sequential(nn.Linear(size.width, wide), nn.GELU(), nn.Linear(wide, size.width))
        self.gate = Gate(size.width) if gated else None
        self.mix = nn.Linear(EXPERTS, size.width) if gated else None

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        if self.gate is not None:
            x = x + self.mix(self.gate(x, keep))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A decoder with learned positions; the head shares the embedding's weight, as in GPT-2."""

    def __init__(self, size: Size):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size, gated=n == size.blocks // 2) for n in range(size.blocks))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, keep)
        return self.head(self.norm(x))


class Training:
    """A model, an optimizer, a batch and `step`; `plant` puts a fault in, `rewind` undoes what the steps did."""

    def __init__(self, size: Size, device: str, optimizer: Callable[..., torch.optim.Optimizer] | None = None):
        torch.manual_seed(0)
        self.size, self.device = size, torch.device(device)
        self.model = Model(size).to(self.device)
        made = optimizer or functools.partial(torch.optim.AdamW, fused=size.fused or None)
        self.optimizer = made(self.model.parameters(), lr=1e-4)
        draw = torch.Generator().manual_seed(1)
        data = torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=draw).to(self.device)
        self.batch, self.targets = data[:, :-1].contiguous(), data[:, 1:].reshape(-1)
        self.keep = torch.ones(size.batch, 1, 1, device=self.device)
        self.step()  # so that the optimizer has its state, which `rewind` needs
        self._saved = [t.detach().clone() for t in self._state()]

    def step(self) -> torch.Tensor:
        """One whole training step."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.casting():
            loss = F.cross_entropy(self.model(self.batch, self.keep).flatten(0, 1), self.targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def casting(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.size.half)

    def plant(self, fault: str | None) -> Planted | None:
        """Make the next steps fail in "forward" or in "backward", or make them healthy again (None)."""
        number = self.size.blocks // 2
        self.model.blocks[number].gate.by = "length" if fault == "backward" else "sum"
        self.keep.fill_(1)
        if fault is None:
            return None
        self.keep[PADDED_ROW] = 0
        code, text = {
            "forward": ("nan/div-by-zero", "return asked / asked.sum"),
            "backward": ("nan/sqrt-grad-at-zero", "length = asked.pow(2)"),
        }[fault]
        return Planted(code, f"blocks.{number}.gate", text, (PADDED_ROW,))

    def rewind(self) -> None:
        """Parameters and the optimizer's state as they were at first; a NaN in them would spoil the next step."""
        with torch.no_grad():
            for now, then in zip(self._state(), self._saved, strict=True):
                now.copy_(then)
        self.optimizer.zero_grad(set_to_none=True)

    def _state(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*self.model.parameters(), *kept]

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
