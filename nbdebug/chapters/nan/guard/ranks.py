"""All processes of a distributed run take the same decision, or one would wait for the others for ever.

Once a step, in the same place, each process hands in a row of numbers: its norm, and what it finds not finite. One
all-reduce makes a table of these rows, on the device and without reading it. Decisions are taken from the table only,
so that all take the same. In DDP the norm is the same everywhere; of sharded gradients each row holds a part.

A process decides alone where the others can't answer: they have no guard, or they may have run out of batches
(`with ddp.join():`). In DDP gradients are the same everywhere by then, and so is what is decided from them.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.nan.guard.norms import exactly, total_norm
from nbdebug.chapters.nan.guard.parallel import Spread

NORM, LOSS, NAN, BUFFER, FOUND, USED_UP, LEFT = range(7)
"""The columns: gradient norm (of sharded gradients a part); whether a loss is not finite, is NaN; whether a buffer is
not finite; the scaler's found_inf; whether its scale is used up; whether this process's guard has had a fault."""
COLUMNS = 7
WAIT = 30.0
"""Seconds that the first step waits for the other processes' guards. By then DDP has brought all of them to the same
place, so those that have a guard have made it."""


class OtherProcess(Exception):
    """The guard of another process has had a fault of its own."""


class Ranks:
    """The processes of a run. rank: this one; world: how many; members: those that train the models together, in the
    order of the table's rows; together: whether they decide together; asked: whether they have, in this hook."""

    def __init__(self, models: Iterable[nn.Module] = (), device: torch.device | None = None):
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.members: tuple[int, ...] = (self.rank,)
        self.device, self.asked = device or torch.device("cpu"), False
        self.promised = False  # the others wait for what this process has to share
        self.sharded = False  # each process holds a part of the gradients only
        self._met = self._alone = False
        self.spread = Spread()
        self._take(Spread.of(models))

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> Ranks | None:
        """The processes that train these models together; None for a run of one process."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        models = list(models)
        device = next((p.device for model in models for p in model.parameters()), None)
        return cls(models, device) if torch.distributed.get_world_size() > 1 else None

    def notice(self) -> None:
        """A model is being called: inside a DDP, though it was given without it?"""
        if self.spread.group is None:
            self._take(Spread.now())

    def _take(self, spread: Spread) -> None:
        if spread.group is None or torch.distributed.get_world_size(spread.group) < 2:
            return
        self.spread, self.members = spread, tuple(torch.distributed.get_process_group_ranks(spread.group))
        self.sharded, self.device = spread.sharded, self._where(self.device)
        _present(self._key(self.rank), 1)

    @property
    def speaks(self) -> bool:
        """Whether it is this process that shows what all have found together."""
        return self.rank == self.members[0] or not self.together

    @property
    def together(self) -> bool:
        """Whether the processes decide together now."""
        if self.spread.group is None or self._alone or self.spread.uneven():
            return False
        if not self._met:
            self._met, self._alone = True, not self._meet()
        return not self._alone

    # -- the table ----------------------------------------------------------------------------------------------------

    def agree(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all members, one below the other; this process's own where it decides alone. The row is ours."""
        if not self.together:
            if self.spread.uneven():
                row[LOSS : BUFFER + 1] = 0  # the rest is the same in every process
            return row[None]
        self.device = self._where(row.device)
        table = torch.zeros(len(self.members), COLUMNS, dtype=torch.float64, device=self.device)
        table[self.members.index(self.rank)] = row.to(self.device)
        torch.distributed.all_reduce(table, group=self.spread.group)
        self.asked = True
        return table.to(row.device)

    def own_norm(self, optimizer: Any, gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """What this process has of the norm of an optimizer's gradients: all of it, or a part."""
        return self._own(optimizer, gradients, device, total_norm).float()

    def _own(
        self, optimizer: Any, gradients: list[torch.Tensor], device: torch.device, measure: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        if self.sharded and optimizer is not None:
            return self.spread.parted_norm(optimizer, device, len(self.members), measure)
        return measure(gradients, device)

    def agreed(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of a look (see `numbers.py`), as all processes see them, and then three columns of the table."""
        norm, found, buffers, loss, bad, nan, used_up = numbers.double().unbind()
        spoiled, left = (~torch.isfinite(buffers)).double(), torch.zeros_like(loss)
        table = self.agree(torch.stack([norm, bad, nan, spoiled, found, used_up, left]))
        most, norms = table[:, LOSS:].amax(0), table[:, NORM]
        norm = torch.linalg.vector_norm(norms) if self.sharded else norms.amax()  # whole ones are alike
        buffers = torch.where(most[BUFFER - LOSS] > 0, math.nan, 0.0)
        bad, nan, found, used_up = (most[column - LOSS] for column in (LOSS, NAN, FOUND, USED_UP))
        first = torch.stack([norm, found, buffers, loss, bad, nan, used_up])
        return torch.cat([first, table[:, LOSS], table[:, NAN], table[:, LEFT]]).float()

    def exactly(self, optimizer: Any, gradients: list[torch.Tensor], device: torch.device) -> float:
        """The norm of all gradients in 64 bits. All must call it."""
        row = torch.zeros(COLUMNS, dtype=torch.float64, device=device)
        row[NORM] = self._own(optimizer, gradients, device, _in_64_bits)
        norms = self.agree(row)[:, NORM]
        return float(torch.linalg.vector_norm(norms) if self.sharded else norms.amax())

    def any(self, mine: bool) -> bool:
        """Whether it is so in any process. All must call it."""
        row = torch.zeros(COLUMNS, dtype=torch.float64, device=self.device)
        row[BUFFER] = float(mine)
        return bool(self.agree(row)[:, BUFFER].sum() > 0)

    def members_of(self, rows: int) -> tuple[int, ...]:
        """The processes that the rows of a table belong to."""
        return self.members if rows == len(self.members) else (self.rank,)

    def say_left(self) -> bool:
        """Hand in that this process's guard has had a fault. True once every guard has left: none asks any more.

        The fault may be in any other function here, so this calls none of them."""
        table = torch.zeros(len(self.members), COLUMNS, dtype=torch.float64, device=self.device)
        table[self.members.index(self.rank), LEFT] = 1
        torch.distributed.all_reduce(table, group=self.spread.group)
        return bool((table[:, LEFT] > 0).all())

    def share(self, mine: Any) -> list[Any]:
        """What every member has to say, in the order of the rows. All must call it."""
        packed = pickle.dumps(mine)  # what can't be packed still has to be answered for
        self.promised = False
        everyone: list[Any] = [None] * len(self.members)
        on = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with on:
            torch.distributed.all_gather_object(everyone, packed, group=self.spread.group)
        return [pickle.loads(one) for one in everyone]

    def _where(self, device: torch.device) -> torch.device:
        """A device whose tensors the group can sum: NCCL takes none of the CPU's."""
        config = torch.distributed.get_backend_config(self.spread.group)
        kinds = [entry.split(":")[0] for entry in config.split(",")]
        return device if device.type in kinds or ":" not in config else torch.device(kinds[0])

    # -- who has a guard ----------------------------------------------------------------------------------------------

    def _key(self, rank: int) -> str:
        return f"nbdebug/guard/{'-'.join(map(str, self.members)) if len(self.members) < self.world else 'all'}/{rank}"

    def _meet(self) -> bool:
        """Whether all members have a guard: asked of the run's store, where nobody has to answer."""
        until = time.monotonic() + WAIT
        missing = [rank for rank in self.members if rank != self.rank]
        while missing := [rank for rank in missing if _present(self._key(rank), 0) == 0]:
            if time.monotonic() > until:
                _present(self._key(self.rank), -1)  # they must not count on this one
                warnings.warn(
                    "nbdebug's guard decides alone in this process, because "
                    f"{_processes(missing)} no guard. Make the guard in every process of the run.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """This process's guard is gone."""
        if self.spread.group is not None and not self._alone:
            _present(self._key(self.rank), -1)
        self.spread = Spread()


def _in_64_bits(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor(exactly(gradients), dtype=torch.float64, device=device)


def _present(key: str, change: int) -> int:
    """How many guards a process has, after a change; 1 where the run has no store to ask."""
    try:
        return torch.distributed.distributed_c10d._get_default_store().add(key, change)
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, KeyError):
        return 1


def _processes(ranks: list[int]) -> str:
    return f"process {ranks[0]} has" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))} have"
