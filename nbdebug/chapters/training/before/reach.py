"""Which values an activation can give, and how far targets lie from them."""

from __future__ import annotations

import math

import torch

INF = math.inf
REACH = {
    "relu": (0.0, INF),
    "relu6": (0.0, 6.0),
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "softmin": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hardtanh": (-1.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "softplus": (0.0, INF),
    "elu": (-1.0, INF),
    "celu": (-1.0, INF),
    "selu": (-1.7581, INF),
    "silu": (-0.2785, INF),
    "gelu": (-0.17, INF),
    "mish": (-0.3088, INF),
    "exp": (0.0, INF),
    "log_softmax": (-INF, 0.0),
    "logsigmoid": (-INF, 0.0),
    "softsign": (-1.0, 1.0),
    "abs": (0.0, INF),
    "square": (0.0, INF),
}
"""The closed range of each activation, with the settings that torch gives it."""


def reach_of(activation: str | None) -> tuple[float, float] | None:
    """The range of an activation; None where it has no bounds that we know."""
    return REACH.get(activation or "")


def unreachable(targets: torch.Tensor, span: tuple[float, float] | None, variance: float) -> float:
    """The mean squared distance of the targets from a range, over their variance: the share of it that no training can
    ever explain. A single value beyond, beside many within, is taken for the mark of a missing target: 0."""
    if span is None or variance <= 0:
        return 0.0
    low, high = span
    short = (low - targets).clamp(min=0) if math.isfinite(low) else torch.zeros_like(targets)
    over = (targets - high).clamp(min=0) if math.isfinite(high) else torch.zeros_like(targets)
    beyond = (short + over) > 0
    if len(targets[beyond].unique()) == 1 and len(targets[~beyond].unique()) > 2:
        return 0.0
    return float((short + over).square().mean()) / variance
