"""A GradScaler over time: its scale, the steps that it leaves out, whose gradient overflowed, clipping too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.tools.grad_watch.history import ScaleHistory
from nbdebug.tools.grad_watch.report import scale_notes, scaler_findings

NAMES = ["a.weight", "b.weight"]
LAYERS = ["a", "b"]


class Overflowing(torch.autograd.Function):
    """Passes a gradient on as float16 does: what is beyond 65504 is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient * 2.0**8).half().float() / 2.0**8


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Overflowing.apply(torch.tanh(self.second(torch.tanh(self.first(x))))))


def train(
    steps: int,
    clip: Any = None,
    factor: Any = lambda step: 1.0,
    init: float = 2.0**16,
    fused: bool = False,
    unscale: bool = False,
    growth: int = 2000,
    every: int = 1,
) -> Any:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=growth)
    with nbdebug.grad_watch(model, optimizer, every=every) as watch:
        for step in range(steps):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(factor(step) * (model(torch.randn(16, 6)) - 2).square().mean()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip(model)
            scaler.step(optimizer)
            scaler.update()
    assert watch.fault == ""
    return watch


@pytest.mark.parametrize("fused", [False, True])
def test_scale_and_skipped_steps_are_told_with_the_layer_that_overflowed(fused: bool) -> None:
    watch = train(20, fused=fused)
    scales = watch.history.scales
    assert scales.attempts == 20 and scales.initial == 2.0**16 and 0 < scales.skipped < 12
    assert scales.last == 2.0**16 / 2**scales.skipped
    said = next(n for n in watch.report().notes if n.startswith("GradScaler"))
    assert f"65536 → {scales.last:g}; {scales.skipped} of 20 steps skipped; `second` overflowed first" in said
    assert "normal while it looks for its scale" in said and watch.report().ok
    assert watch.totals.loss.max() < 20 and watch.totals.scale.iloc[-1] == scales.last
    assert watch.history.bad == {}
    drawn = watch.report().plot("gradients")
    assert drawn["scale"][0] == [0, 2.0**16] and drawn["skipped"]
    assert "GradScaler left out" in watch.html() and watch.figure().axes
    assert "loss scale" in str([text.get_text() for axes in watch.figure().axes for text in axes.texts])


def test_a_scale_that_never_moves_is_one_line_and_no_curve() -> None:
    report = train(5, init=2.0**5).report()
    assert "GradScaler: scale 32 throughout; 0 of 5 steps skipped." in report.notes
    assert "scale" not in report.plot("gradients")


def test_between_measured_steps_what_is_left_out_is_measured_all_the_same() -> None:
    scales = train(20, every=7).history.scales
    assert scales.skipped and sum(scales.first.values()) == scales.skipped


def test_a_scale_that_collapses_is_a_finding() -> None:
    report = train(40, factor=lambda step: 1e9).report()
    assert [f.code for f in report] == ["nan/not-located"]
    assert "has collapsed from 65536 to" in report.findings[0].title and report.findings[0].where.module == "second"
    nan = train(40, factor=lambda step: float("nan") if step > 3 else 1.0).report()
    assert "NaN: no scale helps" in nan.findings[0].title and "`head`" in nan.findings[0].title


def test_steps_left_out_again_and_again_are_a_finding_and_single_ones_are_not() -> None:
    often = train(120, init=2.0**8, factor=lambda step: float("inf") if step % 3 == 2 else 1.0, growth=1).report()
    assert often.ok, "a scaler that grows in every step is left out in every second"
    often = train(
        120, init=2.0**60, factor=lambda step: 1e-16 * (float("nan") if step > 50 and step % 3 == 2 else 1)
    ).report()
    assert "keeps skipping steps" in often.findings[0].title
    assert train(120, init=2.0**8, factor=lambda step: float("inf") if step % 30 == 9 else 1.0).report().ok


def test_growth_explains_what_it_costs() -> None:
    scales = ScaleHistory(100)
    scales.growth = 5
    for step in range(300):
        scales.add(step, 2.0**10, step % 4 == 3, {})
    assert scaler_findings(scales, NAMES, LAYERS) == []
    scales.growth = 2000
    assert len(scaler_findings(scales, NAMES, LAYERS)) == 1
    assert "throughout; 75 of 300" in scale_notes(scales, NAMES, LAYERS)[0]


CLIPS = [
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("fused", [False, True])
def test_clipping_before_the_scale_is_taken_out_is_named(clip: Any, fused: bool) -> None:
    report = train(12, clip, init=2.0**6, fused=fused).report()
    assert [f.code for f in report] == ["training/clip-before-unscale"]
    assert "while they carry the scale 64, in 12 of 12 steps" in report.findings[0].title
    assert train(12, clip, init=2.0**6, fused=fused, unscale=True).report().ok


def test_division_by_a_constant_before_it_is_taken_out_is_no_fault() -> None:
    assert train(12, lambda model: [p.grad.div_(4) for p in model.parameters()], init=2.0**6).report().ok


def test_the_methods_are_put_back_however_many_watch() -> None:
    methods = torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (nbdebug.grad_watch(model, optimizer) for _ in range(2))
    assert torch.amp.GradScaler.step is not methods[0]
    first.close()
    assert torch.amp.GradScaler.step is not methods[0]
    second.close()
    assert (torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_) == methods
