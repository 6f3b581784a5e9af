"""The buffers of some models as they were when a step began. Only those that steps change are copied."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

Kept = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, int]]
"""By module and name: the buffer itself, a copy of it, and how often it had been written then."""


class Buffers:
    """Copies of buffers, taken when a step begins; a buffer that nobody wrote since then keeps the copy that it has."""

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
                if known is None or known[0] is not buffer or known[2] != buffer._version:
                    fresh[home] = buffer
        if fresh:
            copies = [torch.empty_like(b) for b in fresh.values()]
            with torch.no_grad():
                torch._foreach_copy_(copies, [b.detach() for b in fresh.values()])
            self._kept = self._kept | {home: (buffer, copy, buffer._version)
                                       for (home, buffer), copy in zip(fresh.items(), copies, strict=True)}
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
                if version != buffer._version:
                    buffer.detach().copy_(torch.where(dropped.to(buffer.device, non_blocking=True), copy, buffer))

    def moved(self, kept: Kept) -> list[torch.Tensor]:
        """The floating-point buffers that were written since they were kept."""
        return [b for b, _, version in kept.values() if b.is_floating_point() and version != b._version]


def _ordinary(buffer: torch.Tensor) -> bool:
    """Whether it has values of its own and torch counts how often they are written."""
    return buffer.layout is torch.strided and buffer.device.type != "meta" and not buffer.is_inference()
