"""The buffers of some models as they were when a step began.

Torch counts how often a tensor is written, but not every writer counts: batch norm updates its running statistics in
silence, and so does code that goes through `.data`. So all buffers that may hold statistics are copied each step; only
large ones of whole numbers (position tables, causal masks) rely on the count.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nbdebug.observe.tensors import all_finite

Kept = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, int]]
"""By module and name: the buffer itself, a copy of it, and how often it had been written then."""


SMALL = 2**16
"""Elements up to which a copy costs less than to ask whether it is needed (256 kB in float32: some microseconds)."""


class Buffers:
    """Copies of buffers, taken when a step begins."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._modules = {id(m): m for model in models for m in model.modules() if m._buffers}
        self._kept: Kept = {}

    def keep(self) -> Kept:
        """The buffers as they are now."""
        fresh: dict[tuple[int, str], torch.Tensor] = {}
        for number, module in self._modules.items():
            for name, buffer in module._buffers.items():
                if buffer is None or not _ordinary(buffer):
                    continue
                home = number, name
                known = self._kept.get(home)
                if known is None or known[0] is not buffer or _may_have_moved(buffer, known[2]):
                    fresh[home] = buffer
        if fresh:
            copies = [torch.empty_like(b) for b in fresh.values()]
            with torch.no_grad():
                torch._foreach_copy_(copies, [b.detach() for b in fresh.values()])
            self._kept = self._kept | {
                home: (buffer, copy, buffer._version)
                for (home, buffer), copy in zip(fresh.items(), copies, strict=True)
            }
        return self._kept

    def restore(self, kept: Kept) -> None:
        """Put the buffers back, in place, bit for bit."""
        with torch.no_grad():
            for (number, name), (buffer, copy, _) in kept.items():
                self._modules[number]._buffers[name] = buffer
                buffer.detach().copy_(copy)

    def restore_where(self, dropped: torch.Tensor, kept: Kept) -> None:
        """Put the buffers back where `dropped` (one bool on a device) is true. Nothing is read."""
        with torch.no_grad():
            for buffer, copy, version in kept.values():
                if _may_have_moved(buffer, version):
                    buffer.detach().copy_(torch.where(dropped.to(buffer.device, non_blocking=True), copy, buffer))

    def moved(self, kept: Kept) -> list[torch.Tensor]:
        """The floating-point buffers that may have been written since they were kept."""
        return [
            b
            for b, _, version in kept.values()
            if b.is_floating_point() and b.numel() and (version != b._version or b.numel() <= SMALL)
        ]

    def spoiled(self, kept: Kept) -> bool:
        """Whether a buffer that was finite when it was kept is so no more. Reads each."""
        return any(
            all_finite(copy) and not all_finite(buffer)
            for buffer, copy, _ in kept.values()
            if buffer.is_floating_point()
        )


def _may_have_moved(buffer: torch.Tensor, version: int) -> bool:
    return buffer.is_floating_point() or buffer.is_complex() or buffer.numel() <= SMALL or buffer._version != version


def _ordinary(buffer: torch.Tensor) -> bool:
    """Whether it has values of its own and torch counts how often they are written."""
    return buffer.layout is torch.strided and buffer.device.type != "meta" and not buffer.is_inference()
