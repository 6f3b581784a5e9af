"""Denoisers whose best answer is known: data that lie near one pattern."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

BETAS = torch.linspace(1e-4, 0.02, 1000)
ALPHAS = torch.cumprod(1 - BETAS, 0)


class Denoiser(nn.Module):
    """Gives the noise, the clean data or v, for data around a pattern. rate: 0 gives nothing but zeros."""

    def __init__(self, pattern: torch.Tensor, kind: str, rate: float = 1.0) -> None:
        super().__init__()
        self.pattern, self.kind, self.rate = pattern, kind, rate
        self.dropout = nn.Dropout(0.5)

    def forward(self, noisy: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        level = ALPHAS[steps].view(-1, 1, 1)
        noise = (noisy - level.sqrt() * self.pattern) / (1 - level).sqrt()
        velocity = level.sqrt() * noise - (1 - level).sqrt() * self.pattern
        outputs = {"epsilon": noise, "sample": self.pattern.expand_as(noisy), "v_prediction": velocity}
        return self.dropout(self.rate * outputs[self.kind])


def denoising(kind: str, prediction: str | None, rate: float = 1.0) -> SimpleNamespace:
    maker = torch.Generator().manual_seed(0)
    pattern = torch.randn(8, 8, generator=maker)
    clean = pattern + 0.2 * torch.randn(32, 8, 8, generator=maker)
    model = Denoiser(pattern, kind, rate)
    return SimpleNamespace(model=model, schedule={"betas": BETAS}, clean=clean, prediction=prediction)


def training_step(model: nn.Module, offset: float = 0.0, adaptive: float = 0.0, deviation: float = 1.0) -> Any:
    """The loss of a clean batch (N, 8, 8), its eight rows taken for channels; what noise it adds is known."""

    def step(clean: torch.Tensor) -> torch.Tensor:
        steps = torch.randint(0, len(ALPHAS), (len(clean),))
        noise = deviation * torch.randn_like(clean)
        shared = offset + adaptive * clean.mean(2, keepdim=True).abs()
        noise = noise + shared * torch.randn(*clean.shape[:2], 1)
        level = ALPHAS[steps].view(-1, 1, 1)
        return (model(level.sqrt() * clean + (1 - level).sqrt() * noise, steps) - noise).square().mean()

    return step
