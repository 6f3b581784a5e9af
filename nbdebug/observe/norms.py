"""Norms of gradients: one of all together, or one of each, computed on the device in a few fused kernels, not read.

The norm of a 16-bit gradient is computed in 32 bits: it may overflow 16 bits though every element is finite. A 32-bit
norm that overflows is computed again in 64 bits before it is reported (`exact_norm`, and `group_norms` with `wide`).
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.tensors import largest, plain_values, read_scalars

_HALF = (torch.float16, torch.bfloat16)
PART = 1024
"""Elements in a part of a sum on a CPU: as fast as one long sum, and right to 1 in 10 million."""


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that the optimizer is about to use: this process's part of each, and of a sparse one its values."""
    return [
        g
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
        if (g := plain_values(p.grad)).numel()
    ]


def total_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients together: a 0-dimensional float32 tensor on `device`, not read; inf or NaN if an
    element is."""
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


def exact_norm(gradients: list[torch.Tensor]) -> float:
    """The 2-norm of all gradients together in 64 bits, read; NaN if an element is not finite."""
    if not all(map(math.isfinite, read_scalars(largest(gradients)))):
        return math.nan
    return math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients))


class GroupNorms(NamedTuple):
    """2-norms of some parameters' gradients (or weights, or updates), by the parameters' numbers; not read."""

    numbers: tuple[int, ...]
    values: torch.Tensor

    def over(self, scale: torch.Tensor | None) -> GroupNorms:
        """Divided by a gradient scaler's scale."""
        if scale is None:
            return self
        return GroupNorms(self.numbers, self.values / scale.to(self.values.device).reshape(()))


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Within, nothing is recorded: not by autograd, not by the modes of another watch."""
    with torch.no_grad(), _disable_current_modes():
        yield


def has_norm(tensor: Any) -> bool:
    """Whether the norm of a parameter can be computed: a float or complex tensor with its own storage, or a DTensor."""
    numeric = isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())
    if not numeric or tensor.device.type == "meta":
        return False
    return hasattr(tensor, "to_local") or not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def group_norms(tensors: Sequence[tuple[int, Any]], wide: bool = False) -> list[GroupNorms]:
    """The norms of numbered tensors: one `GroupNorms` for each device and dtype. Empty tensors have none. wide: in
    float64."""
    groups: dict[tuple, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, tensor in tensors:
        values = plain_values(tensor)
        if values.numel():
            groups[values.device, values.dtype].append((number, values))
    norms = []
    for (device, dtype), members in groups.items():
        within = torch.float64 if wide and device.type != "mps" else torch.float32 if dtype in _HALF else None
        each = (_on_cpu if device.type == "cpu" else _fused)([values for _, values in members], within)
        stacked = torch.stack(each)
        if device.type == "cpu" and not wide and bool(torch.isinf(stacked).any()):
            stacked = torch.stack(_on_cpu([values for _, values in members], torch.float64))
        norms.append(GroupNorms(tuple(number for number, _ in members), stacked))
    return norms


def _fused(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def _on_cpu(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Small tensors together, each large one in parts."""
    small = [t for t in tensors if t.numel() <= 4 * PART]
    norms = iter(_fused(small, dtype) if small else ())
    return [next(norms) if t.numel() <= 4 * PART else _in_parts(t.reshape(-1), dtype) for t in tensors]


def _in_parts(flat: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of the norms of rows of PART elements, and of the rest."""
    rows = flat.numel() // PART
    each = torch.linalg.vector_norm(flat[: rows * PART].view(rows, PART), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[rows * PART :], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([each, rest.reshape(1)]))


def reads_asynchronously(device: torch.device) -> bool:
    """Whether this device works asynchronously, so that a read is deferred until an event says that it is done."""
    return device.type == "cuda"


def is_capturing_graph() -> bool:
    """Whether ops are only recorded for a CUDA graph: there are no values to measure."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
