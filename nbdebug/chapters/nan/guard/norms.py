"""One number for all gradients: their norm, computed on the device in a few fused kernels, without reading it.

A gradient in 16 bits is measured in 32: its norm may be beyond what 16 bits hold though every element is fine. A
gradient in 32 bits whose norm is beyond 32 bits is measured again in 64 before anything is said of it (`exactly`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from nbdebug.observe.tensors import largest, plain, read

_HALF = (torch.float16, torch.bfloat16)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that the optimizer is about to use: this process's own part of each, without gaps."""
    return [
        g
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
        if (g := plain(p.grad)).numel()
    ]


def total_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients together: one float32 number on `device`, not read. NaN and inf go through."""
    groups: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient)
    norms: list[torch.Tensor] = []
    for (_, dtype), members in groups.items():
        each = torch._foreach_norm(members, 2, dtype=torch.float32 if dtype in _HALF else None)
        norms += [n.to(device, torch.float32, non_blocking=True) for n in each]
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(norms))


def exactly(gradients: list[torch.Tensor]) -> float:
    """The 2-norm in 64 bits, read; NaN or inf only when an element is."""
    if not all(map(math.isfinite, read(largest(gradients)))):
        return math.nan
    return math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients))
