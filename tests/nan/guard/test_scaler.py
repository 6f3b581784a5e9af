"""GradScaler: gradients that overflow at a growing scale are normal; a NaN loss, or an overflow at scale 1, is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import changed, kept
from tests.nan.leftovers import assert_nothing_is_left

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)
told = pytest.mark.parametrize("given", [True, False], ids=["scaler given", "scaler not given"])


@pytest.fixture(autouse=True)
def no_leftovers():
    torch.manual_seed(0)
    yield
    assert_nothing_is_left()


class Steep(torch.autograd.Function):
    """The same values; a gradient `slope` times as steep."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.slope = slope
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.slope, None


class Scaled:
    """A training with a scaler. steep: steps in which scaled gradients overflow until the scale is small enough."""

    def __init__(
        self,
        kind: str,
        scale: float = 2.0**16,
        steep: tuple[int, ...] = (),
        slope: float = 1e35,
        bad: tuple[int, ...] = (),
        clip: float | None = None,
        growth: int = 2000,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
        self.steep, self.slope, self.bad, self.clip = steep, slope, bad, clip
        self.inputs = torch.randn(30, 5, 4)

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        out = self.model(self.inputs[i])
        if i in self.steep:
            out = Steep.apply(out, self.slope)
        loss = out.square().mean()
        if i in self.bad:
            loss = loss + torch.log((out.square() + 0.1) * torch.tensor([1.0, -1, 1, 1, 1])[:, None]).mean()
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def guard(self, given: bool, **more):
        return nbdebug.guard(self.model, self.optimizer, **more, **({"scaler": self.scaler} if given else {}))

    def kept(self) -> dict:
        return kept([self.model], [self.optimizer])


@every_optimizer
@told
@pytest.mark.parametrize("clip", [None, 0.5])
def test_overflow_at_a_high_scale_is_counted_and_no_alarm(kind: str, given: bool, clip: float | None, capsys) -> None:
    bare, guarded = (Scaled(kind, steep=(1, 2, 5), clip=clip) for _ in range(2))
    for i in range(8):
        bare.step(i)
    skips = round(torch.log2(torch.tensor(2.0**16 / bare.scaler.get_scale())).item())
    assert skips == 3
    with guarded.guard(given) as guard:
        for i in range(8):
            guarded.step(i)
    assert guard.report().ok and not guard.trips and capsys.readouterr().err == ""
    assert guarded.scaler.get_scale() == bare.scaler.get_scale()
    assert not changed(bare.kept(), guarded.kept())
    assert guard.skipped == 0, "the scaler skipped, not the guard"
    if not given:  # what a scaler that is not known keeps from the optimizer is no step
        assert guard.steps in (5, 8)
        return
    assert guard.scaler_skips == skips
    assert [line.outcome for line in guard.lines] == ["scaler" if i in (1, 2, 5) else "ok" for i in range(8)]
    assert "3" in " ".join(guard.report().notes) and "GradScaler" in " ".join(guard.report().notes)


@every_optimizer
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_loss_that_is_not_finite_trips(kind: str, clip: float | None) -> None:
    training = Scaled(kind, bad=(3,), clip=clip)
    with training.guard(True):
        for i in range(3):
            training.step(i)
        before = training.kept()
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            training.step(3)
    assert not changed(before, training.kept())
    assert (caught.value.step, caught.value.trip.reason) == (3, "loss")
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.samples, finding.where.step) == ("nan/log-of-nonpositive", (1,), 3)


@every_optimizer
def test_a_loss_that_is_not_finite_trips_late_where_the_scaler_is_not_known(kind: str) -> None:
    """It keeps the optimizer from stepping, so nothing is spoiled; told at the next step at the latest."""
    training = Scaled(kind, bad=(3,))
    with training.guard(False, on_trip="raise"):
        for i in range(3):
            training.step(i)
        before = training.kept()
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            training.step(3)
            training.step(4)
    assert not changed(
        {k: v for k, v in before.items() if "norm" not in k},
        {k: v for k, v in training.kept().items() if "norm" not in k},
    )
    assert (caught.value.step, caught.value.trip.reason) == (3, "loss")


@every_optimizer
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_overflow_at_scale_one_trips(kind: str, scale: float) -> None:
    """Nothing is left to scale down: this overflow is real."""
    training = Scaled(kind, scale=scale, steep=(2,), slope=1e39)
    with training.guard(True, on_trip="raise"):
        training.step(0)
        training.step(1)
        before = training.kept()
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            training.step(2)
    assert not changed(before, training.kept())
    assert (caught.value.step, caught.value.trip.reason) == (2, "gradient")


def test_a_scale_that_falls_to_one_trips_then() -> None:
    training = Scaled("AdamW", scale=8.0, steep=tuple(range(2, 30)), slope=1e39)
    with training.guard(True, on_trip="raise") as guard, pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(30):
            training.step(i)
    assert guard.scaler_skips == 3 and caught.value.step == 5  # 8, 4, 2 are skipped; at 1 it is real


@every_optimizer
def test_norms_and_losses_are_told_unscaled(kind: str) -> None:
    scaled, plain = Scaled(kind, scale=1024.0), Scaled(kind, scale=1.0)
    with scaled.guard(True) as one:
        for i in range(4):
            scaled.step(i)
    with plain.guard(True) as other:
        for i in range(4):
            plain.step(i)
    assert [line.norm for line in one.lines] == pytest.approx([line.norm for line in other.lines], rel=1e-3)
    assert [line.loss for line in one.lines] == pytest.approx([line.loss for line in other.lines], rel=1e-3)


@every_optimizer
def test_clipping_by_the_guard_works_on_unscaled_gradients(kind: str) -> None:
    by_hand, guarded = Scaled(kind, scale=1024.0, clip=0.05), Scaled(kind, scale=1024.0)
    for i in range(5):
        by_hand.step(i)
    with guarded.guard(True, max_grad_norm=0.05) as guard:
        for i in range(5):
            guarded.step(i)
    assert guard.clipped == 5
    one, other = by_hand.kept(), guarded.kept()
    for (_, a), (_, b) in zip(by_hand.model.named_parameters(), guarded.model.named_parameters()):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert one.keys() == other.keys()


@every_optimizer
def test_a_skipped_step_leaves_the_scaler_in_order(kind: str) -> None:
    training = Scaled(kind, bad=(2, 4), growth=3)
    with training.guard(True, on_trip="skip") as guard:
        for i in range(8):
            training.step(i)
    assert guard.skipped == 2 and guard.steps == 8
    assert all(torch.isfinite(p).all() for p in training.model.parameters())
    assert all(torch.isfinite(b).all() for b in training.model.buffers())


def test_a_disabled_scaler_is_no_scaler() -> None:
    training = Scaled("AdamW", bad=(2,))
    training.scaler = torch.amp.GradScaler("cpu", enabled=False)
    with training.guard(True), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(4):
            training.step(i)
    assert caught.value.step == 2


class OwnUpdate(torch.amp.GradScaler):
    """As FSDP's."""

    def update(self, new_scale=None):
        super().update(new_scale)


@told
@pytest.mark.parametrize("own", [False, True])
def test_the_scalers_methods_are_given_back(given: bool, own: bool) -> None:
    training, methods = Scaled("AdamW", steep=(1,)), dict(vars(torch.amp.GradScaler))
    training.scaler.__class__ = OwnUpdate if own else torch.amp.GradScaler
    before = dict(vars(training.scaler))
    with training.guard(given) as guard:
        for i in range(3):
            training.step(i)
    assert guard.steps == 3 and guard.scaler_skips == 1 and methods == dict(vars(torch.amp.GradScaler))
    assert set(vars(training.scaler)) == set(before)
    assert "found_inf" not in vars(training.optimizer) and "grad_scale" not in vars(training.optimizer)
