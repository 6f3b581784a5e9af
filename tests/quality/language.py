"""Logits and tokens as a language model's evaluation has them: texts of several lengths, some easy and some hard."""

from __future__ import annotations

import torch

PAD = 0


def language(rows: int = 14, wide: int = 18, vocabulary: int = 40, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits (N, T, V), tokens (N, T)), padded at the end with PAD, which the model finds easy."""
    maker = torch.Generator().manual_seed(seed)
    lengths = torch.randint(wide // 3, wide + 1, (rows,), generator=maker)
    tokens = torch.randint(1, vocabulary, (rows, wide), generator=maker)
    tokens[torch.arange(wide) >= lengths[:, None]] = PAD
    logits = torch.randn(rows, wide, vocabulary, generator=maker)
    following = torch.cat([tokens[:, 1:], torch.full((rows, 1), PAD)], 1)
    gain = torch.linspace(0, 5, rows)[:, None] + 0.5 * torch.randn(rows, wide, generator=maker)
    logits.scatter_add_(2, following[..., None], torch.where(following == PAD, 7.0, gain)[..., None])
    return logits, tokens
