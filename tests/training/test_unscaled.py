"""An optimizer that steps by itself on gradients of a scaled loss: named by the whole run, and by a watch of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from tests.training.loops import clusters, cross_entropy, loaders, made


def by_itself(optimizer: Any, scaler: Any) -> None:
    optimizer.step()


def by_scaler(optimizer: Any, scaler: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def unscaled(optimizer: Any, scaler: Any) -> None:
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()


def divided(optimizer: Any, scaler: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.div_(scaler.get_scale())
    optimizer.step()


def divided_data(optimizer: Any, scaler: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.data /= scaler.get_scale()
    optimizer.step()


def training(step: Any, kind: Any = torch.optim.SGD, scaled: bool = True, **more: Any) -> Any:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))
    optimizer = kind(model.parameters(), lr=0.02, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, enabled=scaled)
    ns = made(model, optimizer, cross_entropy, loaders(*clusters(500)), 1)

    def train(callback: Any = lambda step, loss: None) -> None:
        done = 0
        for _ in range(4):
            for batch in ns.train_loader:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                scaler.scale(loss).backward()
                step(optimizer, scaler)
                callback(done, loss.item())
                done += 1

    ns.train = train
    return ns


def diagnosed(ns: Any) -> nbdebug.Report:
    parts = {name: getattr(ns, name) for name in ("model", "optimizer", "loss_fn", "train_loader", "val_loader")}
    return nbdebug.diagnose(ns.train, **parts, progress=False)


def watched(ns: Any) -> nbdebug.Report:
    with nbdebug.grad_watch(ns.model, ns.optimizer) as watch:
        ns.train()
    return watch.report()


@pytest.mark.parametrize("ask", [diagnosed, watched])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_scale_that_nobody_takes_out_is_named(ask: Any, kind: Any) -> None:
    found = ask(training(by_itself, kind)).findings[0]
    assert found.code == "precision/unscale-order" and "scale 512" in found.title
    assert {"scaler", "optimizer"} <= set(found.evidence["where"]) and found.evidence["scale"] == 512
    assert "scaler.step(optimizer)" in found.fixes[0].code


@pytest.mark.parametrize("ask", [diagnosed, watched])
@pytest.mark.parametrize("step", [by_scaler, unscaled, divided, divided_data])
def test_a_scale_that_is_taken_out_is_not(ask: Any, step: Any) -> None:
    assert "precision/unscale-order" not in [f.code for f in ask(training(step))]


@pytest.mark.parametrize("ask", [diagnosed, watched])
def test_nor_is_a_fused_optimizer_or_a_scaler_that_is_turned_off(ask: Any) -> None:
    fused, off = training(by_scaler, torch.optim.AdamW, fused=True), training(by_itself, scaled=False)
    assert not [f for ns in (fused, off) for f in ask(ns) if f.code.startswith("precision/")]
