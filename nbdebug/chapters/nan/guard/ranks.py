"""All processes of a distributed run take the same decision, or one would wait for the others for ever.

Once a step, a few numbers of each process are summed over all of them, on the device, without reading: the part of a
sharded gradient norm, and one place for each process in which it says whether its own loss or norm is not finite.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Ranks:
    """The processes of a run. sharded: each holds only a part of the gradients (FSDP)."""

    def __init__(self, rank: int, world: int, sharded: bool):
        self.rank, self.world, self.sharded = rank, world, sharded

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> Ranks | None:
        """The processes that train these models together; None for a model that trains alone."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        modules = [m for model in models for m in model.modules()]
        kinds = {kind.__name__ for m in modules for kind in type(m).__mro__}
        sharded = bool(kinds & {"FullyShardedDataParallel", "FSDPModule"})
        world = torch.distributed.get_world_size()
        if world < 2 or not (sharded or "DistributedDataParallel" in kinds):
            return None
        return cls(torch.distributed.get_rank(), world, sharded)

    def agree(self, norm: torch.Tensor, losses_bad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(norm over all, which processes' losses are bad, which norms are): numbers on the device, none read."""
        mine = torch.zeros(1 + 2 * self.world, device=norm.device)
        mine[0] = norm.square()
        mine[1 + self.rank] = losses_bad
        mine[1 + self.world + self.rank] = ~torch.isfinite(norm)
        torch.distributed.all_reduce(mine)
        return mine[0].sqrt() if self.sharded else norm, mine[1:1 + self.world], mine[1 + self.world:]

    def share(self, mine: Any) -> list[Any]:
        """What every process has to say, in the order of ranks. All must call it."""
        everyone: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(everyone, mine)
        return everyone


def alone(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel: it can be run by one process, without the others."""
    parallel = sys.modules.get("torch.nn.parallel")
    return model.module if parallel is not None and isinstance(model, parallel.DistributedDataParallel) else model
