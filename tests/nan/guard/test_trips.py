"""A trip: what is at hand afterwards, what is as before the bad step, and where the fault is said to be."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import Training, changed, kept
from tests.nan.leftovers import assert_nothing_is_left, hooks_of


@pytest.fixture(autouse=True)
def no_leftovers():
    torch.manual_seed(0)
    yield
    assert_nothing_is_left()


def trip(training: Training, steps: int = 8, **given) -> nbdebug.NonFiniteStep:
    """Train until the guard raises."""
    with nbdebug.guard(training.model, training.optimizer, **given), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(steps):
            training.step(i)
    return caught.value


def test_the_last_lines_the_inputs_and_the_random_numbers_are_at_hand() -> None:
    training, twin = Training("AdamW plain", bad=(5,)), Training("AdamW plain", bad=(5,))
    torch.manual_seed(3)
    losses = []
    for i in range(5):
        losses.append(twin.step(i))
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    began = time.time()
    error = trip(training, keep=3, on_trip="raise")
    told = error.trip
    assert [line.step for line in told.lines] == [3, 4, 5]
    assert [line.loss for line in told.lines[:2]] == pytest.approx(losses[3:5])
    assert told.lines[-1].outcome == "tripped" and told.lines[-1].loss == told.loss == float("inf")
    assert all(began <= line.time <= time.time() for line in told.lines)
    ((name, args, kwargs),) = told.inputs
    assert isinstance(name, str) and kwargs == {}
    assert args[0].data_ptr() == training.inputs[5].data_ptr(), "a reference, not a copy"
    assert torch.equal(told.tape.random, drawn)
    assert (told.late, told.rank) == (0, None) and isinstance(told.bad_ranks, tuple)


def test_raise_now_and_locate_later() -> None:
    training = Training("AdamW plain", bad=(2,))
    before = None
    with nbdebug.guard(training.model, training.optimizer, on_trip="raise") as guard:
        training.step(0)
        training.step(1)
        before, drawn = training.kept(), None
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            training.step(2)
        drawn = torch.get_rng_state()
    assert guard.active is False and caught.value.trip.report is None
    report = caught.value.trip.locate()
    assert (report.findings[0].code, report.findings[0].where.samples) == ("nan/log-of-nonpositive", (3,))
    assert caught.value.trip.report is report and caught.value.trip.locate() is report
    assert not changed(before, training.kept()), "a replay leaves no trace"
    assert torch.equal(torch.get_rng_state(), drawn)
    assert hooks_of(training.model) == 0


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_replay_leaves_gradients_and_random_numbers_as_the_step_left_them(fault: str) -> None:
    bare, guarded = Training("SGD plain", (1,), fault), Training("SGD plain", (1,), fault)
    torch.manual_seed(3)
    bare.step(0), bare.step(1)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    assert trip(guarded).report.findings
    assert torch.equal(torch.get_rng_state(), drawn)
    for one, other in zip(bare.model.parameters(), guarded.model.parameters()):
        assert one.grad is None or torch.equal(one.grad.nan_to_num(7.0), other.grad.nan_to_num(7.0))


def test_the_report_is_shown_and_comes_with_the_exception(capsys) -> None:
    error = trip(Training("AdamW plain", bad=(2,)))
    assert isinstance(error, RuntimeError) and error.report is error.trip.report
    said = capsys.readouterr().err
    assert "nan/log-of-nonpositive" in said and "log" in said
    assert "step 2" in str(error), str(error)
    assert error.report.question == "guard(model, optimizer)" or "guard" in error.report.question


def test_raising_shows_nothing(capsys) -> None:
    trip(Training("AdamW plain", bad=(2,)), on_trip="raise")
    said = capsys.readouterr()
    assert said.out == "" and said.err == ""


def test_the_guards_own_report_tells_of_the_last_trip() -> None:
    training = Training("AdamW plain", bad=(2,))
    with nbdebug.guard(training.model, training.optimizer) as guard:
        training.step(0)
        assert guard.report().ok and "1 step watched" in str(guard.report())
        training.step(1)
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            training.step(2)
    assert guard.report().findings == caught.value.report.findings
    assert guard.report().question == "guard(model, optimizer)"
    assert "nan/log-of-nonpositive" in repr(guard)
    assert set(guard._repr_mimebundle_()) >= {"text/plain", "text/html"}
    assert guard.report().to_dict()


@pytest.mark.parametrize("middle", [0, 1, 3])
def test_gradient_accumulation_with_a_bad_micro_batch(middle: int) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, weights = torch.randn(12, 5, 4), torch.ones(12, 5, 1)
    weights[4 + middle, 2] = 0

    def step(number: int) -> None:
        optimizer.zero_grad()
        for i in range(4 * number, 4 * number + 4):
            loss = torch.log((model(inputs[i]).square() + 0.1) * weights[i]).mean()
            (loss / 4).backward()
        optimizer.step()

    with nbdebug.guard(model, optimizer) as guard:
        step(0)
        before = kept([model], [optimizer])
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            step(1)
    assert not changed(before, kept([model], [optimizer])), "the buffers of all four forwards too"
    assert guard.steps == 2 and caught.value.step == 1
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.step, finding.where.samples) == ("nan/log-of-nonpositive", 1, (2,))
    given = [args[0].data_ptr() for _, args, _ in caught.value.trip.inputs]
    assert given == [inputs[i].data_ptr() for i in range(4, 8)]


def test_gradients_that_add_up_to_infinity_over_micro_batches() -> None:
    """Each micro-batch is finite; their sum is not."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with nbdebug.guard(model, optimizer, on_trip="raise"), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for _ in range(3):
            (model(torch.full((1, 2), 2e38)) * 1.0 - model(torch.full((1, 2), 2e38)).detach()).sum().backward()
        optimizer.step()
    assert caught.value.trip.reason == "gradient" and torch.isfinite(model.weight).all()


def test_dropout_draws_the_same_masks_in_the_replay() -> None:
    """A row fails only where the mask leaves nothing over: without the same masks the replay could not say which."""
    torch.manual_seed(4)
    model, inputs = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), torch.rand(40, 6, 3) + 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows: list = []
    with nbdebug.guard(model, optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(40):
            optimizer.zero_grad()
            level = model(inputs[i]).square().sum(1)
            rows.append(tuple((level == 0).nonzero().flatten().tolist()))
            torch.log(level).mean().backward()
            optimizer.step()
    assert rows[-1] and 0 < len(rows[-1]) < 6
    assert caught.value.report.findings[0].where.samples == rows[-1]


def test_batch_norm_buffers_after_a_trip_and_after_a_skip() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = torch.randn(4, 5, 4)
    inputs[1, 0, 0] = float("nan")
    counts = []
    with nbdebug.guard(model, optimizer, on_trip="skip") as guard:
        for i in range(4):
            optimizer.zero_grad()
            model(inputs[i]).square().mean().backward()
            optimizer.step()
            counts.append(int(model[0].num_batches_tracked))
            assert torch.isfinite(model[0].running_mean).all(), i
    assert counts == [1, 1, 2, 3] and guard.skipped == 1


def test_training_may_go_on_after_a_trip_that_was_caught() -> None:
    by_hand, guarded = Training("AdamW plain", bad=(2,)), Training("AdamW plain", bad=(2,))
    torch.manual_seed(5)
    for i in range(6):
        by_hand.left_out(i) if i == 2 else by_hand.step(i)
    torch.manual_seed(5)
    with nbdebug.guard(guarded.model, guarded.optimizer, on_trip="raise") as guard:
        for i in range(6):
            try:
                guarded.step(i)
            except nbdebug.NonFiniteStep as error:
                assert error.step == i == 2
    assert not changed(by_hand.kept(), guarded.kept())
    assert guard.fault == ""


def test_two_trips_are_two() -> None:
    training = Training("SGD plain", bad=(1, 4))
    with nbdebug.guard(training.model, training.optimizer, on_trip="skip") as guard:
        for i in range(6):
            training.step(i)
    assert guard.skipped == guard.bad == 2 and "2 of 6 steps" in " ".join(guard.report().notes)


def test_a_learning_rate_that_is_not_a_number() -> None:
    training = Training("AdamW plain")
    with nbdebug.guard(training.model, training.optimizer, on_trip="raise"):
        training.step(0)
        training.step(1)
        before = {k: v for k, v in training.kept().items() if "group" not in k}
        training.optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(nbdebug.NonFiniteStep):
            training.step(2)
    assert not changed(before, {k: v for k, v in training.kept().items() if "group" not in k})


@pytest.mark.parametrize("foreach", [False, True])
def test_an_epsilon_that_vanishes_in_half_precision(foreach: bool) -> None:
    """Loss and gradients are finite; the update divides by zero. The guard has a copy to go back to."""
    model = nn.Embedding(9, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=foreach)
    before = kept([model], [optimizer])
    with nbdebug.guard(model, optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        model(torch.tensor([1, 2, 2])).float().square().mean().backward()
        optimizer.step()
    assert not changed(before, kept([model], [optimizer]))
    assert caught.value.trip.reason == "parameter"
    assert caught.value.report.findings[0].code == "nan/optimizer-eps-underflow"


def test_weights_that_were_spoiled_before_the_guard_came() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight[0, 2] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with nbdebug.guard(model, optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        model(torch.randn(5, 3)).mean().backward()
        optimizer.step()
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.module) == ("nan/parameter-nonfinite", "1")


def test_a_dropped_trip_lets_everything_go() -> None:
    def once(on_trip: str) -> list[weakref.ref]:
        training = Training("AdamW plain", bad=(2,))
        error = trip(training, on_trip=on_trip)
        return [weakref.ref(x) for x in (training.model, training.optimizer, training.model.stem.weight, error.trip)]

    for on_trip in ("trace", "raise"):
        watched = once(on_trip)
        gc.collect()
        assert [ref() for ref in watched] == [None] * 4, on_trip


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_trip": "stop"},
        {"keep": 0},
        {"keep": 1.5},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": "1"},
        {"skip_above": float("nan")},
        {"scaler": object()},
        {"record": 7},
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict) -> None:
    training = Training("SGD plain")
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        nbdebug.guard(training.model, training.optimizer, **wrong)
    assert hooks_of(training.model) == 0


@pytest.mark.parametrize(
    ("model", "optimizer"), [(object(), None), (None, object()), (nn.Linear(1, 1), nn.Linear(1, 1)), ([1], None)]
)
def test_things_that_are_no_model_or_optimizer_are_refused(model, optimizer) -> None:
    training = Training("SGD plain")
    with pytest.raises((TypeError, ValueError), match=r"got|is"):
        nbdebug.guard(model or training.model, optimizer or training.optimizer)
