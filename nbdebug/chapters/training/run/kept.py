"""What the user's loop read, kept to be read again: batches, and the random numbers as they stood when each was read.

A loader that shuffles draws from the global random numbers, and so does whoever reads another loader in between, so
that the second pass can't be had by reading once more. Tensors are copied, because loops write into their batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from nbdebug.chapters.training.run.sources import MOST_BYTES
from nbdebug.observe.state import sources as global_sources
from nbdebug.observe.tensors import tensors_in

MOST = 2400
"""Batches: four for each step that an experiment has at most."""


class Kept:
    """batches: the first that were read; draws: for each, what puts torch's random numbers back."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.draws: list[Callable[[], None]] = []
        self._size = 0
        self._full = False

    def add(self, batch: Any) -> None:
        """Keep it, where there is room (256 MB on the CPU; nothing is copied that lies on an accelerator)."""
        tensors = tensors_in(batch)
        self._size += sum(t.numel() * t.element_size() for t in tensors)
        self._full = (
            self._full
            or len(self.batches) >= MOST
            or self._size > MOST_BYTES
            or any(t.device.type != "cpu" for t in tensors)
        )
        if not self._full:
            self.batches.append(tree_map_only(torch.Tensor, lambda t: t.detach().clone(), batch))
            self.draws.append(_put_back())

    def used(self, indices: Sequence[int]) -> tuple[list[Any], list[Callable[[], None]]]:
        """The batches with these indices, and their draws; nothing where one of them was not kept."""
        if not all(0 <= i < len(self.batches) for i in indices):
            return [], []
        return [self.batches[i] for i in indices], [self.draws[i] for i in indices]


def _put_back() -> Callable[[], None]:
    states = [(write, read()) for name, read, write in global_sources() if not name.startswith(("Python", "NumPy"))]

    def put_back() -> None:
        for write, state in states:
            write(state)

    return put_back
