"""The guard where the optimizer decides on the device: a healthy step reads nothing, a bad one changes nothing.

Run by hand on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.observe.snapshot import Snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LATEST = 2  # steps that may have begun before the host knows; the stop itself needs one more call


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(torch.sqrt(hidden + 1e-3) / (x[:, :1] * 0 + (x[:, :1] != 0)))  # a zero divides


class Training:
    """A small training whose batch at the steps `bad` holds a zero in row 3."""

    def __init__(self, bad: tuple[int, ...] = (), make: Callable[..., Any] = torch.optim.AdamW, **options: Any):
        torch.manual_seed(0)
        self.model = Net().cuda()
        self.optimizer = make(self.model.parameters(), lr=1e-3, **(options or {"fused": True}))
        self.bad, self.calls = bad, 0
        self.before: list[Snapshot] = []

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)
        if number in self.bad:
            x[3, 0] = 0
        return x.cuda(), y.cuda()

    def step(self, number: int, scaler: Any = None) -> torch.Tensor:
        x, y = self.batch(number)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        if scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            scaler.scale(loss * 10).backward()
            scaler.step(self.optimizer)
            scaler.update()
        return loss.detach()

    def run(self, steps: int, leave_out: tuple[int, ...] = ()) -> Training:
        for number in range(steps):
            if number not in leave_out:
                self.step(number)
        return self


def state(training: Training) -> list[torch.Tensor]:
    """Everything that a step changes, copied."""
    inside = [t for s in training.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone().cpu() for t in (*training.model.parameters(), *training.model.buffers(), *inside)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


FUSED = [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"fused": True, "momentum": 0.9})]
OTHERS = [(torch.optim.AdamW, {}), (torch.optim.SGD, {"foreach": True}), (torch.optim.RMSprop, {"foreach": False})]


@pytest.mark.parametrize(("make", "options"), FUSED + OTHERS)
def test_a_bad_step_changes_nothing_and_is_located(make: Any, options: dict) -> None:
    before = state(Training((5,), make, **options).run(5))
    training = Training((5,), make, **options)
    with pytest.raises(nbdebug.NonFiniteStep) as raised, nbdebug.guard(training.model, training.optimizer):
        training.run(20)
    trip = raised.value.trip
    assert trip.step == 5 and trip.late <= (LATEST + 1 if options.get("fused") else 0)
    assert same(state(training), before)
    finding = trip.report.findings[0]
    assert (finding.code, finding.where.op, finding.where.samples) == ("nan/div-by-zero", "div", (3,))
    assert not hasattr(training.optimizer, "found_inf")


@pytest.mark.parametrize(("make", "options"), FUSED + OTHERS)
def test_skipping_is_as_if_the_step_had_not_been(make: Any, options: dict) -> None:
    wanted = state(Training((4, 5, 9), make, **options).run(14, leave_out=(4, 5, 9)))
    training = Training((4, 5, 9), make, **options)
    with nbdebug.guard(training.model, training.optimizer, on_trip="skip") as guard:
        training.run(14)
    assert same(state(training), wanted)
    assert (guard.steps, guard.skipped) == (14, 3)
    assert [line.step for line in guard.lines if line.outcome == "skipped"] == [9]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_healthy_step_reads_nothing(clip: float | None) -> None:
    training = Training()
    batches = [training.batch(i) for i in range(12)]
    training.batch = lambda number: batches[number]  # type: ignore[method-assign]
    with nbdebug.guard(training.model, training.optimizer, max_grad_norm=clip, skip_above=1e6) as guard:
        training.run(4)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(4, 12):
                training.step(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert guard.steps == 12 and not guard.fault and not guard.trips
    assert guard.clipped == (0 if clip is None else 12)


@pytest.mark.parametrize(("make", "options"), FUSED + OTHERS)
def test_the_same_bits_as_without(make: Any, options: dict) -> None:
    bare, guarded = Training((), make, **options).run(30), Training((), make, **options)
    with nbdebug.guard(guarded.model, guarded.optimizer):
        guarded.run(30)
    assert same(state(bare), state(guarded))


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_is_torchs_own(fused: bool) -> None:
    bare = Training((), torch.optim.AdamW, fused=fused)
    for number in range(10):
        x, y = bare.batch(number)
        bare.optimizer.zero_grad()
        nn.functional.cross_entropy(bare.model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(bare.model.parameters(), 0.1)
        bare.optimizer.step()
    guarded = Training((), torch.optim.AdamW, fused=fused)
    with nbdebug.guard(guarded.model, guarded.optimizer, max_grad_norm=0.1) as guard:
        guarded.run(10)
    for a, b in zip(state(bare), state(guarded), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert guard.clipped == 10


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_that_seeks_its_scale_is_no_alarm_and_a_bad_loss_is(fused: bool) -> None:
    training = Training((9,), torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127)  # beyond float32 for a loss that is larger than 2
    with (
        pytest.raises(nbdebug.NonFiniteStep) as raised,
        nbdebug.guard(training.model, training.optimizer, scaler=scaler, on_trip="raise") as guard,
    ):
        for number in range(20):
            training.step(number, scaler)
    assert guard.scaler_skips >= 1
    assert raised.value.step == 9
    assert vars(scaler).get("update") is None


def test_a_step_whose_norm_is_too_large_is_dropped() -> None:
    norms = []
    training = Training()
    with nbdebug.guard(training.model, training.optimizer, keep=10) as guard:
        training.run(10)
    norms = sorted(line.norm for line in guard.lines)
    again = Training()
    with nbdebug.guard(again.model, again.optimizer, skip_above=norms[7], keep=10) as guard:
        again.run(10)
    assert guard.above >= 1 and not guard.trips


def test_a_record_goes_on_after_the_step_was_located(tmp_path: Any) -> None:
    training = Training((6,))
    with nbdebug.guard(training.model, training.optimizer, on_trip="record", record=tmp_path / "run.nbdebug") as guard:
        training.run(20)
    assert [trip.step for trip in guard.trips] == [6] and guard.trips[0].report.findings[0].code == "nan/div-by-zero"
    record = nbdebug.open_record(tmp_path / "run.nbdebug")
    assert len(record.frame) == 20 and len(record.trips) == 1
    model = copy.deepcopy(training.model)
    assert record.replay(model).findings[0].code == "nan/div-by-zero"


def test_nothing_grows() -> None:
    training = Training()
    with nbdebug.guard(training.model, training.optimizer) as guard:
        training.run(50)
        gc.collect()
        torch.cuda.synchronize()
        memory, things = torch.cuda.memory_allocated(), len(gc.get_objects())
        for _ in range(8):
            training.run(50)
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= memory + 2**16
        assert len(gc.get_objects()) < things + 400
    assert guard.steps == 450


def test_a_compiled_model_goes_on_compiled() -> None:
    training = Training((7,))
    plain = training.model
    training.model = torch.compile(plain)  # type: ignore[assignment]
    with (
        warnings.catch_warnings(),
        pytest.raises(nbdebug.NonFiniteStep) as raised,
        nbdebug.guard(training.model, training.optimizer),
    ):
        warnings.simplefilter("ignore")
        training.run(20)
    assert raised.value.step == 7 and raised.value.report.findings[0].code == "nan/div-by-zero"
