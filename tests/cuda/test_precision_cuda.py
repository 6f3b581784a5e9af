"""precision() and grad_watch's scaler on a card: float16 autocast, planted modules, GradScaler over time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from tests.precision.test_autocast import Difference, Net, Scores, loss_fn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA card")


def network(hot: dict[int, type[nn.Module]]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net(hot).cuda(), torch.randn(2, 5, 8).cuda()


@pytest.mark.parametrize(
    "dtype, kind, code",
    [("float16", Scores, "precision/half-overflow"), ("bfloat16", Difference, "precision/unsafe-op-in-half")],
)
def test_planted_modules_are_found_under_autocast(dtype: str, kind: type[nn.Module], code: str) -> None:
    model, batch = network({1: kind, 4: kind})
    held = torch.cuda.memory_allocated()
    report = nbdebug.precision(model, batch, loss_fn, dtype, progress=False)
    assert report.fp32_modules == ("blocks.1.hot", "blocks.4.hot")
    assert [f.code for f in report] == [code] and report.findings[0].fixes[0].verified is True
    torch._C._cuda_clearCublasWorkspaces()  # 64 MiB that cuBLAS keeps for the next product
    assert torch.cuda.memory_allocated() <= held + 2**20
    costs = next(t for t in report.tables if t.title == "What a step costs")
    assert "peak memory (bytes)" in costs.columns and all(row[2] > 0 for row in costs.rows)
    with nbdebug.keep_fp32(model, report.fp32_modules), torch.autocast("cuda", dtype=getattr(torch, dtype)):
        assert bool(loss_fn(model, batch).isfinite())


def test_a_healthy_model_needs_nothing_and_float64_is_asked() -> None:
    report = nbdebug.precision(*network({}), loss_fn, progress=False)
    assert report.ok and report.fp32_modules == ()
    assert any("float64" in note for note in report.notes)


def train(fused: bool, steps: int, factor: float, clip: bool = False, unscale: bool = False) -> Any:
    model, batch = network({})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cuda")
    with nbdebug.grad_watch(model, optimizer) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model, batch) * factor
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
    assert watch.fault == ""
    return watch


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_and_skipped_steps_are_followed(fused: bool) -> None:
    watch = train(fused, 30, 300.0)
    scales = watch.history.scales
    assert scales.attempts == 30 and scales.initial == 2.0**16 and scales.skipped > 0
    assert scales.last == 2.0**16 / 2**scales.skipped and sum(scales.first.values()) == scales.skipped
    assert watch.report().ok and "overflowed first" in str(watch.report())


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_too_early_is_named(fused: bool) -> None:
    report = train(fused, 12, 1.0, clip=True).report()
    assert [f.code for f in report] == ["training/clip-before-unscale"]
    assert train(fused, 12, 1.0, clip=True, unscale=True).report().ok


@pytest.mark.parametrize("fused", [True])
def test_nothing_is_waited_for(fused: bool) -> None:
    """A fused optimizer leaves steps out on the device: the watch asks the host for nothing."""
    model, batch = network({})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()

    with nbdebug.grad_watch(model, optimizer, ratios_every=0, activations_every=0) as watch:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert watch.fault == "" and watch.history.scales.attempts == 5
