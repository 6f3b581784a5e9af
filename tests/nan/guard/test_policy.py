"""Clip first, then look; drop only what is still too large: against the same policy written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import KINDS, Training, changed
from tests.nan.leftovers import assert_nothing_is_left

STEPS = 12


@pytest.fixture(autouse=True)
def no_leftovers():
    yield
    assert_nothing_is_left()


class ByHand(Training):
    """The policy in plain torch: what the guard must do, to the bit."""

    def policy(self, i: int, clip: float | None, above: float | None) -> tuple[str, bool, float]:
        self.optimizer.zero_grad()
        before = [b.clone() for b in self.model.buffers()]
        self.loss(i).backward()
        with_gradient = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in with_gradient]))
        clipped = clip is not None and norm > clip
        if clip is not None and math.isfinite(norm):
            torch.nn.utils.clip_grad_norm_(with_gradient, clip)
        dropped = not math.isfinite(norm) or (above is not None and norm > above)
        if dropped:
            for buffer, value in zip(self.model.buffers(), before):
                buffer.copy_(value)
            return ("skipped" if not math.isfinite(norm) else "above"), clipped and math.isfinite(norm), norm
        self.optimizer.step()
        return "ok", clipped, norm


def middle_norm(kind: str) -> float:
    """A norm that about half of the steps exceed."""
    training = ByHand(kind)
    torch.manual_seed(5)
    return sorted(training.policy(i, None, None)[2] for i in range(STEPS))[STEPS // 2]


PLAIN = [kind for kind in KINDS if not KINDS[kind].closure and not KINDS[kind].sparse]


@pytest.mark.parametrize("kind", PLAIN)
def test_clipping_is_that_of_torch_to_the_bit(kind: str) -> None:
    limit = middle_norm(kind)
    by_hand, guarded = ByHand(kind), Training(kind)
    torch.manual_seed(5)
    told = [by_hand.policy(i, limit, None) for i in range(STEPS)]
    torch.manual_seed(5)
    with nbdebug.guard(guarded.model, guarded.optimizer, max_grad_norm=limit, keep=STEPS) as guard:
        for i in range(STEPS):
            guarded.step(i)
    assert not changed(by_hand.kept(), guarded.kept())
    assert [line.clipped for line in guard.lines] == [clipped for _, clipped, _ in told]
    assert guard.clipped == sum(clipped for _, clipped, _ in told) and 0 < guard.clipped < STEPS
    assert [line.norm for line in guard.lines] == pytest.approx([norm for *_, norm in told], rel=1e-5)


@pytest.mark.parametrize("kind", ["SGD plain", "AdamW foreach", "Adam fused", "Muon"])
@pytest.mark.parametrize("clip", [None, 2.0, 1.0, 0.5])
@pytest.mark.parametrize("bad", [(), (2, 7)])
def test_the_whole_policy_against_a_computation_by_hand(kind: str, clip: float | None, bad: tuple[int, ...]) -> None:
    if kind not in KINDS:
        pytest.skip(f"this torch has no {kind}")
    middle = middle_norm(kind)
    limit = None if clip is None else clip * middle
    by_hand, guarded = ByHand(kind, bad), Training(kind, bad)
    torch.manual_seed(5)
    told = [by_hand.policy(i, limit, middle) for i in range(STEPS)]
    torch.manual_seed(5)
    with nbdebug.guard(
        guarded.model, guarded.optimizer, max_grad_norm=limit, skip_above=middle, on_trip="skip", keep=STEPS
    ) as guard:
        for i in range(STEPS):
            guarded.step(i)
    assert [line.outcome for line in guard.lines] == [outcome for outcome, *_ in told]
    assert not changed(by_hand.kept(), guarded.kept())
    assert guard.skipped == sum(outcome != "ok" for outcome, *_ in told)
    assert guard.steps == STEPS and guard.bad == len(bad)
    assert guard.above == sum(outcome == "above" for outcome, *_ in told)
    if clip is not None and clip <= 1:
        assert "above" in [line.outcome for line in guard.lines], "the norm before clipping decides"
    elif not bad:
        assert "above" in [line.outcome for line in guard.lines]


def test_a_step_above_is_never_an_alarm(capsys) -> None:
    training = Training("SGD plain")
    before = training.kept()
    with nbdebug.guard(training.model, training.optimizer, skip_above=1e-12) as guard:
        for i in range(4):
            training.step(i)
    assert not changed(before, training.kept()), "weights and buffers"
    assert guard.skipped == 4 and not guard.trips and guard.report().ok
    assert capsys.readouterr().err == ""
    assert "4" in " ".join(guard.report().notes) and "skipped" in " ".join(guard.report().notes).lower()


def test_over_half_clipped_says_that_the_learning_rate_is_too_high() -> None:
    often, seldom = Training("SGD plain"), Training("SGD plain")
    with nbdebug.guard(often.model, often.optimizer, max_grad_norm=1e-4) as guard:
        for i in range(10):
            often.step(i)
    said = " ".join(guard.report().notes)
    assert "learning rate" in said and ("100" in said or "10 of 10" in said), said
    with nbdebug.guard(seldom.model, seldom.optimizer, max_grad_norm=1e4) as guard:
        for i in range(10):
            seldom.step(i)
    assert "learning rate" not in " ".join(guard.report().notes)
    assert guard.clipped == 0


@pytest.mark.parametrize(
    "clip",
    [
        lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1),
        lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
        lambda p: torch.nn.utils.clip_grad_value_(p, 0.1),
    ],
    ids=["norm", "norm foreach", "value"],
)
@pytest.mark.parametrize("fault", [None, "loss", "gradient"])
def test_clipping_by_the_user_before_the_step(clip, fault: str | None) -> None:
    """clip_grad_norm_ turns one bad element into gradients that are all bad; the place is named all the same."""
    bare, guarded = (Training("AdamW plain", (3,) if fault else (), fault or "loss") for _ in range(2))

    def step(training: Training, i: int) -> None:
        training.optimizer.zero_grad()
        training.loss(i).backward()
        clip(list(training.model.parameters()))
        training.optimizer.step()

    count = 3 if fault else 6
    torch.manual_seed(5)
    for i in range(count):
        step(bare, i)
    torch.manual_seed(5)
    with nbdebug.guard(guarded.model, guarded.optimizer) as guard:
        for i in range(count):
            step(guarded, i)
        if fault:
            with pytest.raises(nbdebug.NonFiniteStep) as caught:
                step(guarded, 3)
            code = "nan/log-of-nonpositive" if fault == "loss" else "nan/sqrt-grad-at-zero"
            assert caught.value.report.findings[0].code == code
            assert caught.value.report.findings[0].where.samples == (3,)
    assert not changed(bare.kept(), guarded.kept())
    assert guard.clipped == 0, "the guard did not clip"


def test_an_infinity_that_the_user_clamped_away_is_the_users_business() -> None:
    """clip_grad_value_ takes infinities away: the update is finite, and nothing is spoiled."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nbdebug.guard(model, optimizer) as guard:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.full((1, 2), 1e30)).sum() * 1e-20
            loss.backward()
            model.weight.grad.fill_(float("inf"))
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    assert not guard.trips and torch.isfinite(model.weight).all()
