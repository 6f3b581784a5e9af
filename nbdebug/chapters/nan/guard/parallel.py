"""How a model is spread over processes, and how one process runs its copy of it without the others.

DistributedDataParallel (DDP) gives each process the whole model and averages gradients. FSDP and DTensor give it a part
of every parameter. All of this is asked once, except for `parted_norm`, which is asked once a step.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nbdebug.chapters.nan.guard.norms import total_norm
from nbdebug.observe.talk import talks
from nbdebug.observe.tape import Unfit
from nbdebug.observe.tensors import plain


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
            alike.setdefault(copies, []).append(plain(gradient))
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
        if talks(func):
            raise Unfit(f"the model talks to other processes ({func.__name__.split('.')[0]}), who would have to answer")
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
