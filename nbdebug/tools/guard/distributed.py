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
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nbdebug.observe.norms import exact_norm, total_norm
from nbdebug.observe.ops import is_distributed
from nbdebug.observe.tape import CannotReplay
from nbdebug.observe.tensors import plain_values


class Spread:
    """Which process group trains some models together: None where each process trains alone.

    sharded: each process holds a part of the parameters only. parallels: the DDPs. flat: the FSDPs of the first
    version, which keep their parts as ordinary tensors.
    """

    def __init__(self, group: Any = None, sharded: bool = False, parallels: Iterable[Any] = (), flat: Any = ()):
        self.group, self.sharded, self.parallels, self._flat = group, sharded, list(parallels), list(flat)
        self._held: dict[int, int] | None = None

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> Spread:
        """Found among the modules and parameters themselves."""
        world = torch.distributed.group.WORLD
        modules = list({id(m): m for model in models for m in model.modules()}.values())
        parallels = [m for m in modules if is_parallel(m)]
        meshes = [mesh for m in modules for p in m._parameters.values() if (mesh := getattr(p, "device_mesh", None))]
        flat = [m for m in modules if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(m).__mro__)]
        groups = [m.process_group for m in parallels] + [_group_of(mesh) for mesh in meshes] + [world] * bool(flat)
        if not groups:
            return cls()
        group = groups[0] if all(other is groups[0] for other in groups) else world
        return cls(group, bool(meshes or flat), parallels, flat)

    @classmethod
    def now(cls) -> Spread:
        """Of a model that is being called: it may be inside a DDP that the guard was not given."""
        parallel = sys.modules.get("torch.nn.parallel")
        around = getattr(getattr(parallel, "DistributedDataParallel", None), "_active_ddp_module", None)
        return cls() if around is None else cls(around.process_group, False, [around])

    def uneven(self) -> bool:
        """Whether processes may run out of batches one by one (`with ddp.join():`)."""
        return any(getattr(getattr(m, "_join_config", None), "enable", False) for m in self.parallels)

    def parted_norm(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        processes: int,
        measure: Callable[..., Any] = total_norm,
    ) -> torch.Tensor:
        """This process's part of the norm of all gradients: the root of the sum of everyone's squares is the whole.

        What several processes hold alike counts once: each takes an even share of it.
        """
        if self._held is None:  # not before the first forward, in which FSDP gets ready
            self._held = {p: copies for module in self._flat for p, copies in _held_flat(module).items()}
        alike: dict[int, list[torch.Tensor]] = {}
        for parameter in (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
            gradient = _summed(parameter.grad)
            copies = self._held.get(id(parameter)) or _copies(gradient, processes)
            alike.setdefault(copies, []).append(plain_values(gradient))
        parts = [
            measure([g for g in gradients if g.numel()], device).double() / math.sqrt(copies)
            for copies, gradients in alike.items()
        ]
        return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=device).double()


def is_parallel(module: nn.Module) -> bool:
    """Whether a module is a DistributedDataParallel."""
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(module, parallel.DistributedDataParallel)


def _group_of(mesh: Any) -> Any:
    """The processes of a device mesh; all of the run where a mesh of several dimensions has no group of its own."""
    whole = mesh.ndim > 1 or mesh.size() == torch.distributed.get_world_size()
    return torch.distributed.group.WORLD if whole else mesh.get_group()


def _held_flat(module: Any) -> dict[int, int]:
    """By its id, each parameter that an FSDP of the first version parts: how many processes hold the same part."""
    world = torch.distributed.get_world_size()
    found: dict[int, int] = {}
    for handle in getattr(module, "_all_handles", ()):
        if handle.uses_sharded_strategy:
            copies = max(world // torch.distributed.get_world_size(handle.process_group), 1)
            parameters = handle.flat_param._params if handle._use_orig_params else [handle.flat_param]
            found |= {id(p): copies for p in parameters}
    return found


def _summed(gradient: Any) -> Any:
    """A DTensor whose parts still have to be added up, with that done; anything else as it is."""
    placements = getattr(gradient, "placements", ())
    if not any(p.is_partial() for p in placements):
        return gradient
    from torch.distributed.tensor import Replicate

    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in placements])


def _copies(gradient: Any, processes: int) -> int:
    """How many processes hold this same part of a gradient: all of them, unless it is a DTensor that says else."""
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return processes
    return math.prod(gradient.device_mesh.size(i) for i, p in enumerate(placements) if p.is_replicate())


# -- without the others ------------------------------------------------------------------------------------------------


def alone(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel: it can be run by one process, without the others."""
    inner = model._modules.get("_orig_mod") if type(model).__name__ == "OptimizedModule" else None
    if inner is not None and is_parallel(inner):
        model = inner
    return model.module if is_parallel(model) else model  # type: ignore[return-value]


@contextlib.contextmanager
def by_itself(models: Iterable[nn.Module]) -> Iterator[None]:
    """Within, calls of these models wait for no other process: a DDP only passes its call on, and SyncBatchNorm takes
    its own batch's statistics. Other ops that talk to processes raise Unfit: nobody would answer."""
    with contextlib.ExitStack() as stack:
        for module in {id(m): m for model in models for m in model.modules()}.values():
            if is_parallel(module):
                stack.callback(_replaced(module, module.module))
                stack.callback(_moved_to_its_device(module))
            elif isinstance(module, nn.SyncBatchNorm):
                stack.callback(_replaced(module, _BatchNorm.forward.__get__(module)))
        stack.enter_context(_Silence())
        yield


class _Silence(TorchDispatchMode):
    """No op talks to another process."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_distributed(func):
            raise CannotReplay(
                f"the model talks to other processes ({func.__name__.split('.')[0]}), who would have to answer"
            )
        return func(*args, **(kwargs or {}))


def _replaced(module: nn.Module, forward: Any) -> Any:
    """Let a module run another forward; returns what gives its own back."""
    had, before = "forward" in vars(module), vars(module).get("forward")
    vars(module)["forward"] = forward

    def give_back() -> None:
        if had:
            vars(module)["forward"] = before
        else:
            del vars(module)["forward"]

    return give_back


def _moved_to_its_device(parallel: Any) -> Any:
    """A DDP that was told its device moves what it is called with there; returns what ends that."""
    if not parallel.device_ids:
        return lambda: None
    device = torch.device(parallel.device_type, parallel.device_ids[0])

    def move(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))

    return parallel.module.register_forward_pre_hook(move, with_kwargs=True, prepend=True).remove


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
    return torch.tensor(exact_norm(gradients), dtype=torch.float64, device=device)


def _present(key: str, change: int) -> int:
    """How many guards a process has, after a change; 1 where the run has no store to ask."""
    try:
        return torch.distributed.distributed_c10d._get_default_store().add(key, change)
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, KeyError):
        return 1


def _processes(ranks: list[int]) -> str:
    return f"process {ranks[0]} has" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))} have"


class GuardShutdown:
    """Stands in for the rounds of a guard with a fault. after: the others ask after the optimizer's step, not before.
    stepped: the optimizers that were asked about in the step that has begun."""

    def __init__(self, ranks: Ranks, after: bool, stepped: set[int]):
        self.ranks, self._after, self._stepped = ranks, after, stepped
        try:
            self.over = not ranks.together
        except Exception:  # it was this that had the fault
            self.over = len(ranks.members) < 2
        if ranks.promised:
            with contextlib.suppress(Exception):
                ranks.share(None)

    def before(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        """An optimizer is about to step."""
        self._stepped.add(id(optimizer))
        if not self.ranks.asked:
            self._after = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
            if not self._after:
                self._tell()

    def after(self) -> None:
        """An optimizer has stepped."""
        if self._after and not self.ranks.asked:
            self._tell()
        self._after = False

    def scaler_updates(self, scaler: Any, optimizers: Any) -> None:
        """The GradScaler sets its scale: the others ask here about the optimizers that it has kept from stepping."""
        for optimizer in optimizers:
            asked = self.ranks.asked or id(optimizer) in self._stepped
            if not asked and kept_from_stepping(scaler, optimizer):
                self._tell()
        self._stepped.clear()

    def _tell(self) -> None:
        if self.over:
            return
        try:
            self.over = self.ranks.say_left()
        except Exception:  # the others are gone
            self.over = True


def kept_from_stepping(scaler: Any, optimizer: Any) -> bool:
    """Whether the scaler's `step` has been called for an optimizer since the scaler's last `update`."""
    return getattr(scaler._per_optimizer_states[id(optimizer)].get("stage"), "name", "") == "STEPPED"
