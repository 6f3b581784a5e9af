"""Scenes of two processes that share out a model's parameters with FSDP, in its first and its second version."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import nbdebug
from tests.nan.guard.processes import Stage, scene
from tests.nan.guard.ranks_ddp import BAD, OPTIMIZERS, STEPS, told_of

FAULTS: dict[str, dict[int, str]] = {"loss of 1": {1: "loss"}, "gradient of 1": {1: "gradient"}}
KINDS = ("second", "second, replicated", "first", "first, flat")
"""The versions of FSDP; replicated: both processes hold all of it, as two groups of one do."""


def network() -> nn.Module:
    """The last layer is too narrow to be shared out evenly: one process has a part of nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


class Sharded:
    """One process's part of a training; see `ranks_ddp.Training`."""

    def __init__(self, stage: Stage, kind: str, faults: dict[int, str] | None = None) -> None:
        self.fault = (faults or {}).get(stage.rank, "")
        model = network().to(stage.device)
        if kind.startswith("second"):
            mesh = init_device_mesh(stage.device.type, (2,))
            if "replicated" in kind:
                mesh = init_device_mesh(stage.device.type, (2, 1), mesh_dim_names=("replicas", "parts"))
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif kind.startswith("first"):
            model = FullyShardedDataParallel(model, use_orig_params="flat" not in kind, device_id=stage.device)
        self.model, self.kind = model, kind
        self.optimizer = OPTIMIZERS[stage.device.type](model.parameters())
        draw = torch.Generator().manual_seed(1 + stage.rank)
        self.inputs = torch.randn(STEPS, 5, 4, generator=draw).to(stage.device)
        self.weights = torch.ones(STEPS, 5, 1).to(stage.device)
        self.weights[BAD, 3] = 0.0

    def backward(self, i: int) -> None:
        self.optimizer.zero_grad()
        level = self.model(self.inputs[i]).square() + 0.1
        if self.fault == "loss":
            loss = -torch.log(level * self.weights[i]).mean()
        elif self.fault == "gradient":
            loss = torch.sqrt(level * self.weights[i]).mean()
        else:
            loss = level.mean()
        loss.backward()

    def step(self, i: int) -> None:
        self.backward(i)
        self.optimizer.step()

    def clip(self, most: float) -> float:
        """As it is done without the guard."""
        if self.kind.startswith("second"):
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
            return norm.full_tensor().item()
        return self.model.clip_grad_norm_(most).item()

    def local(self) -> list[bytes]:
        """This process's own parts of parameters and optimizer state."""
        tensors = [p.detach() for p in self.model.parameters()]
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [_local(t).cpu().numpy().tobytes() for t in tensors]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run(training: Sharded, **given: Any) -> dict[str, Any]:
    before, error, guard = training.local(), None, nbdebug.guard(training.model, training.optimizer, **given)
    try:
        with guard:
            for i in range(STEPS):
                before = training.local() if i <= BAD else before
                training.step(i)
    except nbdebug.NonFiniteStep as tripped:
        error = tripped
    if error is not None and error.report is None:
        error.trip.locate()
    return {
        "error": error and (error.step, error.trip.reason),
        "bad": error and error.trip.bad_ranks,
        "report": error and told_of(error.report),
        "fault": guard.fault,
        "steps": guard.steps,
        "same": before == training.local(),
        "after": training.local(),
        "clipped": guard.clipped,
        "outcomes": [line.outcome for line in guard.lines],
        "norms": [line.norm for line in guard.lines],
    }


@scene
def sharded(stage: Stage) -> dict[str, Any]:
    return {
        f"{on_trip}, {kind}, {fault}": run(Sharded(stage, kind, faults), on_trip=on_trip)
        for kind in KINDS
        for fault, faults in FAULTS.items()
        for on_trip in ("trace", "raise", "skip", "record")
    }


@scene
def norms(stage: Stage) -> dict[str, Any]:
    """Norms of all parts together, and clipping by them, beside what torch says of them."""
    told: dict[str, Any] = {}
    for kind in KINDS:
        bare, seen = Sharded(stage, kind), []
        for i in range(STEPS):
            bare.backward(i)
            seen.append(bare.clip(0.05))
            bare.optimizer.step()
        told[kind] = {"torch": seen, "bare": bare.local(), "guard": run(Sharded(stage, kind), max_grad_norm=0.05)}
    return told


def whole_batch(stage: Stage) -> list[float]:
    """The norms that one process has that gets the batches of both, unclipped."""
    model, seen = network().to(stage.device), []
    draws = [torch.Generator().manual_seed(1 + rank) for rank in range(2)]
    inputs = torch.cat([torch.randn(STEPS, 5, 4, generator=draw) for draw in draws], dim=1).to(stage.device)
    optimizer = OPTIMIZERS[stage.device.type](model.parameters())
    for i in range(STEPS):
        optimizer.zero_grad()
        (model(inputs[i]).square() + 0.1).mean().backward()
        seen.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
    return seen


@scene
def unclipped(stage: Stage) -> dict[str, Any]:
    """The same as one process has that gets the batches of both."""
    training = Sharded(stage, "second")
    training.backward(0)
    parts = [_local(p.grad).numel() for p in training.model.parameters()]
    return {"one process": whole_batch(stage), "parts": parts, **{kind: run(Sharded(stage, kind)) for kind in KINDS}}


@scene
def bare(stage: Stage) -> dict[str, Any]:
    """Without a guard."""
    told = {}
    for kind in KINDS:
        training = Sharded(stage, kind)
        for i in range(STEPS):
            training.step(i)
        told[kind] = training.local()
    return told


@scene
def in_half_precision(stage: Stage) -> dict[str, Any]:
    """No copy is made of what is spread over processes; gradients are looked at all the same."""
    training = Sharded(stage, "second", {1: "loss"})
    model = network().half().to(stage.device)
    fully_shard(model, mesh=init_device_mesh(stage.device.type, (2,)))
    training.model, training.inputs = model, training.inputs.half()
    training.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return run(training)


@scene
def a_part_of_the_model(stage: Stage) -> dict[str, Any]:
    """The guard is given a part of a model whose parameters are shared out."""
    training = Sharded(stage, "second", {1: "loss"})
    guard = nbdebug.guard(training.model[2], training.optimizer)
    with contextlib.suppress(nbdebug.NonFiniteStep), guard:
        for i in range(STEPS):
            training.step(i)
    return {"steps": guard.steps, "bad": guard.trips[-1].bad_ranks, "fault": guard.fault}
