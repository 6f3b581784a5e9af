"""LoRA layers as people write them, in a small network, and a training of some steps."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class LoRALinear(nn.Module):
    """A linear layer with factors of its own. scaled: the product is multiplied by alpha / rank."""

    def __init__(self, linear: nn.Linear, rank: int = 4, alpha: float = 8.0, scaled: bool = True) -> None:
        super().__init__()
        self.linear, self.rank, self.alpha, self.scaled = linear.requires_grad_(False), rank, alpha, scaled
        self.lora_A = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = self.dropout(x) @ self.lora_A.T @ self.lora_B.T
        return self.linear(x) + (self.alpha / self.rank if self.scaled else 1.0) * change


class Factors(nn.Module):
    """Factors in a module of their own, (in, r) and (r, out), and alpha without the rank."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(inputs, rank) * 0.1)
        self.B = nn.Parameter(torch.zeros(rank, outputs))
        self.alpha = alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alpha * (x @ self.A @ self.B)


class WithFactors(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int = 4, alpha: float = 2.0) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora = Factors(linear.in_features, linear.out_features, rank, alpha)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.lora(x)


class FusedAttention(nn.Module):
    """Two weights of one shape, each with factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.r = 4
        self.query, self.value = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16).requires_grad_(False)
        self.lora_A_query, self.lora_B_query = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.lora_A_value, self.lora_B_value = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.lora_B_query.weight)
        nn.init.zeros_(self.lora_B_value.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) + self.lora_B_query(self.lora_A_query(x))
        return scores.tanh() * (self.value(x) + self.lora_B_value(self.lora_A_value(x)))


def network(kind: Any = LoRALinear, **more: Any) -> SimpleNamespace:
    """model, base (as it was before) and optimizer."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    base = copy.deepcopy(model)
    for place in (0, 2):
        model[place] = kind(model[place], **more)
    trained = [p for p in model.parameters() if p.requires_grad]
    return SimpleNamespace(model=model, base=base, optimizer=torch.optim.AdamW(trained, lr=1e-2))


def trained(run: SimpleNamespace, steps: int = 12) -> SimpleNamespace:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        run.model(x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


def factors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a program saves of the adapter."""
    return {name: value.clone() for name, value in model.state_dict().items() if "lora" in name}
