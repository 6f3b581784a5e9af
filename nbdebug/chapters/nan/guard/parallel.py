"""How a model is spread over processes, and how one process runs its copy of it without the others.

DistributedDataParallel (DDP) gives each process the whole model and averages gradients. FSDP and DTensor give it a part
of every parameter. What is asked here is asked once, except for `parted_norm`, which is asked once a step.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nbdebug.chapters.nan.guard.norms import local_gradients, total_norm
from nbdebug.observe.tape import Unfit

_TALK = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of the ops by which processes talk to each other."""


class Spread:
    """The process group that trains some models together, None where each process trains alone. sharded: each process
    holds a part of the parameters only. parallels: the DDPs."""

    def __init__(self, group: Any = None, sharded: bool = False, parallels: Iterable[Any] = ()):
        self.group, self.sharded, self.parallels = group, sharded, list(parallels)

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> Spread:
        """Found among the modules and parameters themselves."""
        modules = {id(m): m for model in models for m in model.modules()}.values()
        parallels = [m for m in modules if is_parallel(m)]
        meshes = [p.device_mesh for m in modules for p in m._parameters.values() if hasattr(p, "device_mesh")]
        flat = [m for m in modules if any(k.__name__ == "FullyShardedDataParallel" for k in type(m).__mro__)]
        groups = [m.process_group for m in parallels] + [_group_of(mesh) for mesh in meshes]
        if flat:  # FSDP1: in its hybrid form each has a part of the processes only
            groups.append(torch.distributed.group.WORLD)
        if not groups:
            return cls()
        same = all(group is groups[0] for group in groups)
        return cls(groups[0] if same else torch.distributed.group.WORLD, bool(meshes or flat), parallels)

    @classmethod
    def now(cls) -> Spread:
        """Of a model that is being called: it may be inside a DDP that nobody has shown us."""
        parallel = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
        around = getattr(parallel, "_active_ddp_module", None)
        return cls() if around is None else cls(around.process_group, False, [around])

    def uneven(self) -> bool:
        """Whether processes may run out of batches one by one (`with ddp.join():`)."""
        return any(getattr(getattr(m, "_join_config", None), "enable", False) for m in self.parallels)


def is_parallel(module: nn.Module) -> bool:
    """Whether a module is a DistributedDataParallel."""
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(module, parallel.DistributedDataParallel)


def _group_of(mesh: Any) -> Any:
    """The processes of a device mesh; all of them where a mesh of several dimensions has no group of its own."""
    world = torch.distributed.group.WORLD
    return world if mesh.ndim > 1 or mesh.size() == torch.distributed.get_world_size() else mesh.get_group()


def parted_norm(optimizer: torch.optim.Optimizer, device: torch.device, processes: int) -> torch.Tensor:
    """This process's part of the norm of all gradients: the root of the sum of everyone's squares is the whole.

    What is held by several processes alike counts once: each takes an even share of it.
    """
    alike: dict[int, list[torch.Tensor]] = {}
    for gradient in (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        alike.setdefault(_copies(gradient, processes), []).extend(local_gradients(gradient))
    parts = [total_norm(gradients, device).double() / math.sqrt(copies) for copies, gradients in alike.items()]
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=device).double()


def _copies(gradient: Any, processes: int) -> int:
    """How many processes hold this same part of a gradient."""
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return 1 if type(gradient) is torch.Tensor and gradient.dim() == 1 and _is_flat(gradient) else processes
    mesh = gradient.device_mesh
    return math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate())
