"""Numbers on their way from a device to the host, which waits for none that is younger than two steps.

On a CPU they are read at once. On an accelerator they are copied to pinned memory, and an event says when they are
there; what has not come when two later steps are over is waited for, so that no more than that is ever on its way.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.chapters.training.watch.norms import wait_free

LATE = 2
"""How many later steps may be over before the host waits. One is not enough to keep a device busy."""


@dataclasses.dataclass
class Sent:
    """Tensors of one step: `there` once their numbers are copied, in the order of `sizes`."""

    sizes: list[int]
    there: list[torch.Tensor]
    events: list[Any]
    take: Callable[[list[list[float]]], None]

    def ready(self) -> bool:
        return all(event.query() for event in self.events)

    def read(self) -> None:
        for event in self.events:
            event.synchronize()
        flat = [t.tolist() for t in self.there]
        self.take([values if isinstance(values, list) else [values] for values in flat])


class Post:
    """What is on its way, oldest first."""

    def __init__(self) -> None:
        self.pending: collections.deque[Sent] = collections.deque()

    def send(self, tensors: list[torch.Tensor], take: Callable[[list[list[float]]], None]) -> None:
        """take: gets the numbers of each tensor, in order, when they are there; those of earlier steps come first."""
        there, events = [], []
        for tensor in tensors:
            if not wait_free(tensor.device):
                there.append(tensor)
                continue
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            there.append(pinned.copy_(tensor, non_blocking=True))
        for device in {t.device for t in tensors if wait_free(t.device)}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        self.pending.append(Sent([t.numel() for t in tensors], there, events, take))
        self.hear()

    def hear(self, wait: bool = False) -> None:
        """Read what has arrived, in order. wait: for all."""
        while self.pending and (wait or len(self.pending) > LATE or self.pending[0].ready()):
            self.pending.popleft().read()
