"""grad_watch on a card: right numbers, no waiting, the same bits, scalers of fused optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA card")


def network(fused: bool = True, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, **options)


def backward(model: nn.Module, i: int = 0, scaler: Any = None) -> torch.Tensor:
    draw = torch.Generator(device="cuda").manual_seed(i)
    loss = model(torch.randn(128, 64, device="cuda", generator=draw)).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.detach()


def norms(model: nn.Module) -> dict[str, float]:
    return {n: float(p.grad.double().norm()) for n, p in model.named_parameters()}


def row(watch: Any, step: int, column: str = "norm") -> dict[str, float]:
    part = watch.frame[watch.frame.step == step]
    return dict(zip(part.name, part[column]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_the_table_is_right(fused: bool, clip: bool) -> None:
    model, optimizer = network(fused)
    wanted, after, losses = [], [], []
    with nbdebug.grad_watch(model, optimizer, ratios_every=5) as watch:
        for i in range(12):
            optimizer.zero_grad()
            losses.append(backward(model, i).item())
            wanted.append(norms(model))
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            after.append(norms(model))
            before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            optimizer.step()
            moved = {
                n: float((p.detach().double() - before[n]).norm() / before[n].norm())
                for n, p in model.named_parameters()
            }
            if i % 5 == 0:
                assert row(watch, i, "update_ratio") == pytest.approx(moved, rel=1e-4)
    assert watch.fault == "" and watch.steps == 12
    for i in range(12):
        assert row(watch, i) == pytest.approx(wanted[i], rel=1e-6)
        assert row(watch, i, "norm_after") == pytest.approx(after[i], rel=1e-6)
    assert watch.totals.loss.tolist() == pytest.approx(losses) and watch.history.clipped == 12 * clip


@pytest.mark.parametrize("options", [{}, {"ratios_every": 1, "activations_every": 1}])
def test_no_step_makes_the_host_wait(options: dict) -> None:
    model, optimizer = network()
    draw = torch.Generator(device="cuda").manual_seed(0)
    batch = torch.randn(128, 64, device="cuda", generator=draw)
    with nbdebug.grad_watch(model, optimizer, **options) as watch:
        for i in range(8):
            if i == 4:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            finally:
                if i == 7:
                    torch.cuda.set_sync_debug_mode("default")
    assert watch.fault == "" and watch.steps == 8


def test_numbers_come_at_most_two_steps_late() -> None:
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer) as watch:
        for i in range(20):
            optimizer.zero_grad()
            backward(model, i)
            optimizer.step()
            assert i - 1 <= watch.steps <= i + 1
    assert watch.steps == 20


def test_the_same_bits() -> None:
    bare, watched = network(), network()
    for i in range(10):
        for model, optimizer in (bare,):
            optimizer.zero_grad()
            backward(model, i)
            optimizer.step()
    model, optimizer = watched
    with nbdebug.grad_watch(model, optimizer, ratios_every=2, activations_every=2):
        for i in range(10):
            optimizer.zero_grad()
            backward(model, i)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(bare[0].parameters(), watched[0].parameters()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_scales_are_divided_out(fused: bool, unscale: bool) -> None:
    model, optimizer = network(fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    with nbdebug.grad_watch(model, optimizer) as watch:
        for i in range(4):
            optimizer.zero_grad()
            backward(model, i)
            wanted = norms(model)
            optimizer.zero_grad()
            loss = backward(model, i, scaler)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.synchronize()
            assert row(watch, i) == pytest.approx(wanted, rel=1e-6)
            assert row(watch, i, "norm_after") == pytest.approx(wanted, rel=1e-6)
            assert watch.totals.loss[i] == pytest.approx(loss.item(), rel=1e-5)
    assert watch.history.clipped == 0 and watch.fault == ""


@pytest.mark.parametrize("fused", [True, False])
def test_what_a_scaler_skips_is_no_alarm(fused: bool) -> None:
    model, optimizer = network(fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20)
    with nbdebug.grad_watch(model, optimizer) as watch:
        for i in range(12):
            optimizer.zero_grad()
            backward(model, i, scaler)
            if i % 3 == 0:
                model[0].weight.grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
    assert watch.history.bad == {} and watch.report().ok and watch.fault == ""


def test_a_norm_beyond_float32_is_no_infinity_for_long() -> None:
    weight = nn.Parameter(torch.zeros(10, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with nbdebug.grad_watch(None, optimizer) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            (weight * 1e30).sum().backward()
            optimizer.step()
            torch.cuda.synchronize()
    assert watch.frame.norm.iloc[-1] == pytest.approx(1e30 * math.sqrt(10), rel=1e-6)


def test_a_step_in_a_cuda_graph_is_left_alone() -> None:
    model, optimizer = network(capturable=True)
    batch = torch.randn(128, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with nbdebug.grad_watch(model, optimizer) as watch:
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize()
    assert watch.fault == "" and watch.steps == 3
