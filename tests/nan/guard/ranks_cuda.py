"""Scenes that need two GPUs: shared batch statistics, batches that DDP moves, and steps in which nothing is read."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.nan.guard.processes import Stage, scene
from tests.nan.guard.ranks_ddp import BAD, OPTIMIZERS, STEPS, Network, Training, run


class Early(Network):
    """Its fault comes before the batch norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        level = torch.log(x.abs().sum(1, keepdim=True))  # the log at fault
        return self.head(self.drop(torch.tanh(self.norm(self.stem(x) + level))))


@scene
def shared_statistics(stage: Stage) -> dict[str, Any]:
    """SyncBatchNorm carries a NaN of rank 1 to rank 0 within the forward."""
    training = Training(stage)
    training.inner = nn.SyncBatchNorm.convert_sync_batchnorm(Early()).to(stage.device)
    training.model = DDP(training.inner)
    training.optimizer = OPTIMIZERS["cuda"](training.inner.parameters())
    if stage.rank == 1:
        training.inputs[BAD, 2] = 0.0
    return run(training)


@scene
def batches_on_the_cpu(stage: Stage) -> dict[str, Any]:
    """DDP moves its inputs to its device."""
    training = Training(stage, {1: "loss"}, device_ids=[stage.rank])
    training.inputs = training.inputs.cpu()
    return run(training)


@scene
def nothing_is_read(stage: Stage) -> dict[str, Any]:
    """Healthy steps under torch's own alarm for host synchronisations."""
    training = Training(stage)
    with training.guard(max_grad_norm=1.0, skip_above=1e6) as guard:
        for i in range(4):  # in the first steps DDP makes its buckets, and the guards find each other
            training.step(i)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i in range(4, 30):
                training.step(i)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"steps": guard.steps, "fault": guard.fault, "same": None}


@scene
def what_it_costs(stage: Stage) -> dict[str, float]:
    """Milliseconds of a step, without and with the guard: told, not judged."""
    torch.manual_seed(0)
    layers = [module for _ in range(24) for module in (nn.Linear(2048, 2048), nn.ReLU())]
    inner = nn.Sequential(*layers).to(stage.device)
    training = Training(stage)
    training.model, training.inner = DDP(inner), inner
    training.optimizer = OPTIMIZERS["cuda"](inner.parameters())
    x = torch.randn(4096, 2048, device=stage.device)

    def timed() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            training.optimizer.zero_grad()
            training.model(x).square().mean().backward()
            training.optimizer.step()
        torch.cuda.synchronize()
        return 100 * (time.perf_counter() - began)

    timed()
    found: dict[str, list[float]] = {"bare": [], "guarded": []}
    for _ in range(10):
        found["bare"].append(timed())
        with training.guard():
            timed()
            found["guarded"].append(timed())
    return {kind: sorted(times)[len(times) // 2] for kind, times in found.items()}


assert STEPS > BAD + 3, "the host hears of a bad step up to three steps later"
