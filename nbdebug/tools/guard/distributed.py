"""All processes of a distributed run take the same decision, or one would wait for the others for ever.

Once a step, in the same place, each process contributes a row of numbers: its norm, and what it finds not finite. One
all-reduce makes a table of these rows, on the device and without reading it. Decisions are taken from the table only,
so that all take the same. In DDP the norm is the same everywhere; of sharded gradients each row holds a part.

A process decides alone where the others can't answer: they have no guard, or they may have run out of batches
(`with ddp.join():`). In DDP gradients are the same everywhere by then, and so is the decision.

`TrainingGroup` finds the processes that train together, `Ranks` is the table, `GuardShutdown` takes part in the
all-reduce for a guard that has failed; `without_communication` lets one process run its own batch again.
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
from torch.utils._pytree import tree_map_only

from nbdebug.observe.ops import WatchMode, is_distributed
from nbdebug.observe.tape import CannotReplay
from nbdebug.observe.tensors import exact_norm, plain_values, total_norm
from nbdebug.text import listed


class TrainingGroup:
    """The process group that trains some models together: None where each process trains alone.

    sharded: each process holds a part of the parameters only. ddps: the DistributedDataParallels. fsdps: the FSDPs of
    the first version, which keep their parts as ordinary tensors.
    """

    def __init__(self, group: Any = None, sharded: bool = False, ddps: Iterable[Any] = (), fsdps: Any = ()):
        self.process_group, self.sharded, self.ddps, self._fsdps = group, sharded, list(ddps), list(fsdps)
        self._copies: dict[int, int] | None = None  # how many processes hold a parameter's part, by its id

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> TrainingGroup:
        """Found among the modules and parameters themselves."""
        world = torch.distributed.group.WORLD
        modules = list({id(m): m for model in models for m in model.modules()}.values())
        ddps = [m for m in modules if is_ddp(m)]
        meshes = [mesh for m in modules for p in m._parameters.values() if (mesh := getattr(p, "device_mesh", None))]
        fsdps = [m for m in modules if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(m).__mro__)]
        groups = [m.process_group for m in ddps] + [_group_of(mesh) for mesh in meshes] + [world] * bool(fsdps)
        if not groups:
            return cls()
        group = groups[0] if all(other is groups[0] for other in groups) else world
        return cls(group, bool(meshes or fsdps), ddps, fsdps)

    @classmethod
    def of_call(cls) -> TrainingGroup:
        """Of a model that is being called: it may be inside a DDP that the guard was not given."""
        parallel = sys.modules.get("torch.nn.parallel")
        around = getattr(getattr(parallel, "DistributedDataParallel", None), "_active_ddp_module", None)
        return cls() if around is None else cls(around.process_group, False, [around])

    def may_be_uneven(self) -> bool:
        """Whether processes may run out of batches one by one (`with ddp.join():`)."""
        return any(getattr(getattr(m, "_join_config", None), "enable", False) for m in self.ddps)

    def part_of_norm(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        processes: int,
        measure: Callable[..., Any] = total_norm,
    ) -> torch.Tensor:
        """This process's part of the norm of all gradients: the root of the sum of everyone's squares is the whole.

        What several processes hold alike counts once: each takes an even share of it.
        """
        if self._copies is None:  # not before the first forward, in which FSDP gets ready
            self._copies = {p: copies for module in self._fsdps for p, copies in _flat_copies(module).items()}
        alike: dict[int, list[torch.Tensor]] = {}
        for parameter in (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
            gradient = _summed(parameter.grad)
            copies = self._copies.get(id(parameter)) or _copies(gradient, processes)
            alike.setdefault(copies, []).append(plain_values(gradient))
        parts = [
            measure([g for g in gradients if g.numel()], device).double() / math.sqrt(copies)
            for copies, gradients in alike.items()
        ]
        return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=device).double()


def is_ddp(module: nn.Module) -> bool:
    """Whether a module is a DistributedDataParallel."""
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(module, parallel.DistributedDataParallel)


def _group_of(mesh: Any) -> Any:
    """The processes of a device mesh; all of the run where a mesh of several dimensions has no group of its own."""
    whole = mesh.ndim > 1 or mesh.size() == torch.distributed.get_world_size()
    return torch.distributed.group.WORLD if whole else mesh.get_group()


def _flat_copies(module: Any) -> dict[int, int]:
    """By its id, each parameter that an FSDP of the first version shards: how many processes hold the same part."""
    world = torch.distributed.get_world_size()
    copies_of: dict[int, int] = {}
    for handle in getattr(module, "_all_handles", ()):
        if handle.uses_sharded_strategy:
            copies = max(world // torch.distributed.get_world_size(handle.process_group), 1)
            parameters = handle.flat_param._params if handle._use_orig_params else [handle.flat_param]
            copies_of |= {id(p): copies for p in parameters}
    return copies_of


def _summed(gradient: Any) -> Any:
    """A DTensor whose parts still have to be added up, with that done; anything else as it is."""
    placements = getattr(gradient, "placements", ())
    if not any(p.is_partial() for p in placements):
        return gradient
    from torch.distributed.tensor import Replicate

    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in placements])


def _copies(gradient: Any, processes: int) -> int:
    """How many processes hold this same part of a gradient: all of them, unless it is a DTensor that says otherwise."""
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return processes
    return math.prod(gradient.device_mesh.size(i) for i, p in enumerate(placements) if p.is_replicate())


# -- one process by itself ---------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel: it can be run by one process, without the others."""
    inner = model._modules.get("_orig_mod") if type(model).__name__ == "OptimizedModule" else None
    if inner is not None and is_ddp(inner):
        model = inner
    return model.module if is_ddp(model) else model  # type: ignore[return-value]


@contextlib.contextmanager
def without_communication(models: Iterable[nn.Module]) -> Iterator[None]:
    """Within, calls of these models wait for no other process: a DDP only passes its call on, and SyncBatchNorm uses
    its own batch's statistics. Other ops that communicate raise CannotReplay: no process would answer."""
    with contextlib.ExitStack() as stack:
        for module in {id(m): m for model in models for m in model.modules()}.values():
            if is_ddp(module):
                stack.callback(_replace_forward(module, module.module))
                stack.callback(_move_inputs(module))
            elif isinstance(module, nn.SyncBatchNorm):
                stack.callback(_replace_forward(module, _BatchNorm.forward.__get__(module)))
        stack.enter_context(_NoCommunication())
        yield


class _NoCommunication(WatchMode):
    """No op communicates with another process."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_distributed(func):
            raise CannotReplay(
                f"the model communicates with other processes ({func.__name__.split('.')[0]}), and they would have "
                "to answer"
            )
        return func(*args, **(kwargs or {}))


def _replace_forward(module: nn.Module, forward: Any) -> Any:
    """Let a module run another forward; returns what gives its own back."""
    had, before = "forward" in vars(module), vars(module).get("forward")
    vars(module)["forward"] = forward

    def give_back() -> None:
        if had:
            vars(module)["forward"] = before
        else:
            del vars(module)["forward"]

    return give_back


def _move_inputs(parallel: Any) -> Any:
    """A DDP with a device of its own moves its inputs there; returns what ends that."""
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
WAIT_SECONDS = 30.0
"""Seconds that the first step waits for the other processes' guards. By then DDP has brought all of them to the same
place, so those that have a guard have made it."""


class OtherGuardFailed(Exception):
    """The guard of another process has had a fault of its own."""


class Ranks:
    """The processes of a run. rank: this one; world: how many; members: those that train the models together, in the
    order of the table's rows; together: whether they decide together; agreed: whether they have, in this hook.
    share_due: the others wait for what this process has to share. sharded: each process holds a part of the gradients
    only."""

    def __init__(self, models: Iterable[nn.Module] = (), device: torch.device | None = None):
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.members: tuple[int, ...] = (self.rank,)
        self.device, self.agreed = device or torch.device("cpu"), False
        self.share_due = self.sharded = False
        self._waited = self._alone = False
        self.group = TrainingGroup()
        self._join(TrainingGroup.of(models))

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> Ranks | None:
        """The processes that train these models together; None for a run of one process."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        models = list(models)
        device = next((p.device for model in models for p in model.parameters()), None)
        return cls(models, device) if torch.distributed.get_world_size() > 1 else None

    def model_called(self) -> None:
        """A model is being called: inside a DDP that the guard was not given?"""
        if self.group.process_group is None:
            self._join(TrainingGroup.of_call())

    def _join(self, group: TrainingGroup) -> None:
        if group.process_group is None or torch.distributed.get_world_size(group.process_group) < 2:
            return
        self.group, self.members = group, tuple(torch.distributed.get_process_group_ranks(group.process_group))
        self.sharded, self.device = group.sharded, self._summing_device(self.device)
        _count_guards(self._key(self.rank), 1)

    @property
    def shows(self) -> bool:
        """Whether it is this process that shows what all have found together."""
        return self.rank == self.members[0] or not self.together

    @property
    def together(self) -> bool:
        """Whether the processes decide together now."""
        if self.group.process_group is None or self._alone or self.group.may_be_uneven():
            return False
        if not self._waited:
            self._waited, self._alone = True, not self._wait_for_guards()
        return not self._alone

    # -- the table ----------------------------------------------------------------------------------------------------

    def table(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all members, one below the other; this process's own where it decides alone. The row is ours."""
        if not self.together:
            if self.group.may_be_uneven():
                row[LOSS : BUFFER + 1] = 0  # the rest is the same in every process
            return row[None]
        self.device = self._summing_device(row.device)
        table = torch.zeros(len(self.members), COLUMNS, dtype=torch.float64, device=self.device)
        table[self.members.index(self.rank)] = row.to(self.device)
        torch.distributed.all_reduce(table, group=self.group.process_group)
        self.agreed = True
        return table.to(row.device)

    def own_norm(self, optimizer: Any, gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """What this process has of the norm of an optimizer's gradients: all of it, or a part."""
        return self._measure(optimizer, gradients, device, total_norm).float()

    def _measure(
        self, optimizer: Any, gradients: list[torch.Tensor], device: torch.device, measure: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        if self.sharded and optimizer is not None:
            return self.group.part_of_norm(optimizer, device, len(self.members), measure)
        return measure(gradients, device)

    def combine(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of a check (`StepCheck.numbers`), as all processes see them, and then three columns of the
        table."""
        norm, found_inf, buffers, loss, bad, nan, used_up = numbers.double().unbind()
        bad_buffer, left = (~torch.isfinite(buffers)).double(), torch.zeros_like(loss)
        table = self.table(torch.stack([norm, bad, nan, bad_buffer, found_inf, used_up, left]))
        most, norms = table[:, LOSS:].amax(0), table[:, NORM]
        norm = torch.linalg.vector_norm(norms) if self.sharded else norms.amax()  # whole ones are alike
        buffers = torch.where(most[BUFFER - LOSS] > 0, math.nan, 0.0)
        bad, nan, found_inf, used_up = (most[column - LOSS] for column in (LOSS, NAN, FOUND, USED_UP))
        first = torch.stack([norm, found_inf, buffers, loss, bad, nan, used_up])
        return torch.cat([first, table[:, LOSS], table[:, NAN], table[:, LEFT]]).float()

    def exact_norm(self, optimizer: Any, gradients: list[torch.Tensor], device: torch.device) -> float:
        """The norm of all gradients in 64 bits. All must call it."""
        row = torch.zeros(COLUMNS, dtype=torch.float64, device=device)
        row[NORM] = self._measure(optimizer, gradients, device, _exact_norm)
        norms = self.table(row)[:, NORM]
        return float(torch.linalg.vector_norm(norms) if self.sharded else norms.amax())

    def any(self, mine: bool) -> bool:
        """Whether it is so in any process. All must call it."""
        row = torch.zeros(COLUMNS, dtype=torch.float64, device=self.device)
        row[BUFFER] = float(mine)
        return bool(self.table(row)[:, BUFFER].sum() > 0)

    def members_of(self, rows: int) -> tuple[int, ...]:
        """The processes that the rows of a table belong to."""
        return self.members if rows == len(self.members) else (self.rank,)

    def report_left(self) -> bool:
        """Report that this process's guard has had a fault. True once every guard has left: none waits any more.

        The fault may be in any other function here, so this calls none of them."""
        table = torch.zeros(len(self.members), COLUMNS, dtype=torch.float64, device=self.device)
        table[self.members.index(self.rank), LEFT] = 1
        torch.distributed.all_reduce(table, group=self.group.process_group)
        return bool((table[:, LEFT] > 0).all())

    def share(self, mine: Any) -> list[Any]:
        """What every member shares, in the order of the rows. All must call it."""
        packed = pickle.dumps(mine)  # first: where this fails, the shutdown still has to share something
        self.share_due = False
        everyone: list[Any] = [None] * len(self.members)
        on = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with on:
            torch.distributed.all_gather_object(everyone, packed, group=self.group.process_group)
        return [pickle.loads(one) for one in everyone]

    def _summing_device(self, device: torch.device) -> torch.device:
        """A device whose tensors the group can sum: NCCL takes none of the CPU's."""
        config = torch.distributed.get_backend_config(self.group.process_group)
        kinds = [entry.split(":")[0] for entry in config.split(",")]
        return device if device.type in kinds or ":" not in config else torch.device(kinds[0])

    # -- who has a guard ----------------------------------------------------------------------------------------------

    def _key(self, rank: int) -> str:
        return f"nbdebug/guard/{'-'.join(map(str, self.members)) if len(self.members) < self.world else 'all'}/{rank}"

    def _wait_for_guards(self) -> bool:
        """Whether all members have a guard: read from the run's store, where no process has to answer."""
        until = time.monotonic() + WAIT_SECONDS
        missing = [rank for rank in self.members if rank != self.rank]
        while missing := [rank for rank in missing if _count_guards(self._key(rank), 0) == 0]:
            if time.monotonic() > until:
                _count_guards(self._key(self.rank), -1)  # they must not count on this one
                warnings.warn(
                    "nbdebug's guard decides alone in this process, because "
                    f"process{'es' * (len(missing) > 1)} {listed(missing, len(missing), quote='')} "
                    f"{'has' if len(missing) == 1 else 'have'} no guard. Create the guard in every process of the run.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """This process's guard is gone."""
        if self.group.process_group is not None and not self._alone:
            _count_guards(self._key(self.rank), -1)
        self.group = TrainingGroup()


def _exact_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor(exact_norm(gradients), dtype=torch.float64, device=device)


def _count_guards(key: str, change: int) -> int:
    """How many guards a process has, after a change; 1 where the run has no store."""
    try:
        return torch.distributed.distributed_c10d._get_default_store().add(key, change)
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, KeyError):
        return 1


class GuardShutdown:
    """Stands in for the step tracker of a guard with a fault, until every guard has left. over: they have. after: the
    others agree after the optimizer's step, not before. stepped: the optimizers that were agreed on in this step."""

    def __init__(self, ranks: Ranks, after: bool, stepped: set[int]):
        self.ranks, self._after, self._stepped = ranks, after, stepped
        try:
            self.over = not ranks.together
        except Exception:  # it was this that had the fault
            self.over = len(ranks.members) < 2
        if ranks.share_due:
            with contextlib.suppress(Exception):
                ranks.share(None)

    def before(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        """An optimizer is about to step."""
        self._stepped.add(id(optimizer))
        if not self.ranks.agreed:
            self._after = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
            if not self._after:
                self._report_left()

    def after(self) -> None:
        """An optimizer has stepped."""
        if self._after and not self.ranks.agreed:
            self._report_left()
        self._after = False

    def scaler_updates(self, scaler: Any, optimizers: Any) -> None:
        """The GradScaler sets its scale: the others agree here on the optimizers that it has kept from stepping."""
        for optimizer in optimizers:
            agreed = self.ranks.agreed or id(optimizer) in self._stepped
            if not agreed and withheld_by_scaler(scaler, optimizer):
                self._report_left()
        self._stepped.clear()

    def _report_left(self) -> None:
        if self.over:
            return
        try:
            self.over = self.ranks.report_left()
        except Exception:  # the others are gone
            self.over = True


def withheld_by_scaler(scaler: Any, optimizer: Any) -> bool:
    """Whether the scaler's `step` has been called for an optimizer since the scaler's last `update`."""
    return getattr(scaler._per_optimizer_states[id(optimizer)].get("stage"), "name", "") == "STEPPED"
