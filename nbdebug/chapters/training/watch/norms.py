"""The norm of every gradient, as a few fused kernels on the device, without reading them.

Gradients in 16 bits are measured in 32. On a CPU large ones are measured in parts: adding up four million squares in
float32 one after the other is wrong by 1 in 10,000, in parts by 1 in 10 million. The square of a finite number may be
beyond float32: where a norm is infinite, a CPU measures again in float64; of an accelerator it is known too late, and
the next ones are measured in float64 (`wide`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.tensors import plain

PART = 1024
"""Elements of a part on a CPU: as quick as one long sum, and right to 1 in 10 million."""
_HALF = (torch.float16, torch.bfloat16)


class Norms(NamedTuple):
    """2-norms of some parameters' gradients (or weights, or updates), by the parameters' numbers; not read."""

    numbers: tuple[int, ...]
    values: torch.Tensor

    def over(self, scale: torch.Tensor | None) -> Norms:
        """Divided by a gradient scaler's scale."""
        return self if scale is None else Norms(self.numbers, self.values / scale.to(self.values.device).reshape(()))


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Within, what is computed is seen by no one: not by autograd, not by another watch's modes."""
    with torch.no_grad(), _disable_current_modes():
        yield


def can_be_measured(tensor: Any) -> bool:
    """Whether a parameter has numbers with a norm, in memory of its own or in parts (DTensor)."""
    usual = isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())
    if not usual or tensor.device.type == "meta":
        return False
    return hasattr(tensor, "to_local") or not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def measure(tensors: Sequence[tuple[int, Any]], wide: bool = False) -> list[Norms]:
    """The norms of numbered tensors: one `Norms` for each device and dtype. Empty tensors have none. wide: in
    float64."""
    groups: dict[tuple, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, tensor in tensors:
        values = plain(tensor)
        if values.numel():
            groups[values.device, values.dtype].append((number, values))
    found = []
    for (device, dtype), members in groups.items():
        within = torch.float64 if wide and device.type != "mps" else torch.float32 if dtype in _HALF else None
        each = (_on_a_cpu if device.type == "cpu" else _fused)([values for _, values in members], within)
        stacked = torch.stack(each)
        if device.type == "cpu" and not wide and bool(torch.isinf(stacked).any()):
            stacked = torch.stack(_on_a_cpu([values for _, values in members], torch.float64))
        found.append(Norms(tuple(number for number, _ in members), stacked))
    return found


def _fused(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def _on_a_cpu(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Small ones together, large ones in parts."""
    few = [t for t in tensors if t.numel() <= 4 * PART]
    small = iter(_fused(few, dtype) if few else ())
    return [next(small) if t.numel() <= 4 * PART else _in_parts(t.reshape(-1), dtype) for t in tensors]


def _in_parts(flat: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of the norms of rows of PART elements, and of what is left over."""
    rows = flat.numel() // PART
    each = torch.linalg.vector_norm(flat[: rows * PART].view(rows, PART), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[rows * PART :], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([each, rest.reshape(1)]))


def wait_free(device: torch.device) -> bool:
    """Whether reading from this device is put off: it works behind the host's back, and events say when it is done."""
    return device.type == "cuda"


def capturing() -> bool:
    """Whether what runs is only being recorded for a CUDA graph: there is nothing to measure."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
