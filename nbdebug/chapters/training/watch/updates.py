"""How far a step moves the weights: a copy before it, the norm of the difference after it.

The real change is measured, whatever the optimizer makes of the gradient: momentum, decay and a schedule are in it.
"""

from __future__ import annotations

from typing import Any

import torch

from nbdebug.chapters.training.watch.norms import Norms, measure
from nbdebug.chapters.training.watch.roster import Roster
from nbdebug.observe.tensors import plain


class Updates:
    """Copies of one optimizer's weights while it steps. full: a device had no room for them; no more are made."""

    def __init__(self, roster: Roster):
        self.roster, self.full = roster, False
        self._copies: list[tuple[int, torch.Tensor]] = []
        self._weights: list[Norms] = []

    def before(self, numbers: list[int]) -> None:
        """The optimizer that holds these is about to step."""
        self.forget()
        if self.full:
            return
        try:
            now = [(n, plain(self.roster.parameters[n])) for n in numbers]
            copies = [torch.empty_like(p, memory_format=torch.preserve_format) for _, p in now]
            for group in _alike([p for _, p in now]):
                torch._foreach_copy_([copies[i] for i in group], [now[i][1] for i in group])
            self._copies = [(n, copy) for (n, _), copy in zip(now, copies)]
            self._weights = measure(self._copies)
        except torch.OutOfMemoryError:
            self.full = True
            self.forget()

    def after(self) -> tuple[list[Norms], list[Norms]]:
        """The optimizer has stepped: norms of the weights before, and of what the step has added."""
        weights, copies = self._weights, self._copies
        for group in _alike([copy for _, copy in copies]):
            now = [plain(self.roster.parameters[copies[i][0]]) for i in group]
            torch._foreach_sub_([copies[i][1] for i in group], now)
        moved = measure(copies)
        self.forget()
        return weights, moved

    def forget(self) -> None:
        self._copies, self._weights = [], []


def _alike(tensors: list[Any]) -> list[list[int]]:
    """Places of tensors of one device and dtype each: fused kernels take no mixture."""
    groups: dict[tuple, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    return list(groups.values())
