"""Denoisers whose best answer is known: data that lie near one pattern."""

from __future__ import annotations

from types import SimpleNamespace

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
