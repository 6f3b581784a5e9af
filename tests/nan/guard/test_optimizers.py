"""Every optimizer of torch under the guard: silent and the same bits on healthy steps; a bad step never reaches it."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import nbdebug
from tests.nan.guard.kinds import KINDS, Training, changed
from tests.nan.leftovers import assert_nothing_is_left, hooks_of

STEPS = 6
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def no_leftovers():
    yield
    assert_nothing_is_left()


def test_no_optimizer_of_torch_is_left_out() -> None:
    classes = {c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    made = {type(kind.make([torch.nn.Parameter(torch.ones(2, 2))])) for kind in KINDS.values()}
    assert made == classes - {torch.optim.Optimizer}


@every_kind
def test_healthy_steps_end_in_the_same_bits(kind: str) -> None:
    bare, guarded = Training(kind), Training(kind)
    torch.manual_seed(5)
    losses = [bare.step(i) for i in range(STEPS)]
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    with warnings.catch_warnings(), nbdebug.guard(guarded.model, guarded.optimizer) as guard:
        warnings.simplefilter("error", RuntimeWarning)
        assert [guarded.step(i) for i in range(STEPS)] == losses
    assert not changed(bare.kept(), guarded.kept())
    assert torch.equal(torch.get_rng_state(), drawn)
    for one, other in zip(bare.model.parameters(), guarded.model.parameters()):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad.to_dense(), other.grad.to_dense())
    assert (guard.steps, guard.skipped, guard.clipped, guard.trips, guard.fault) == (STEPS, 0, 0, [], "")
    assert [line.outcome for line in guard.lines] == ["ok"] * STEPS
    assert guard.report().ok
    assert hooks_of(guarded.model) == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "LBFGS" not in kind])
def test_a_line_a_step_tells_loss_norm_and_lr(kind: str) -> None:
    bare, guarded = Training(kind), Training(kind)
    torch.manual_seed(5)
    losses, norms = [], []
    for i in range(STEPS):
        losses.append(bare.step(i))
        grads = [p.grad.to_dense() for p in bare.model.parameters() if p.grad is not None]
        norms.append(float(torch.cat([g.double().flatten() for g in grads]).norm()))
    torch.manual_seed(5)
    with nbdebug.guard(guarded.model, guarded.optimizer) as guard:
        for i in range(STEPS):
            guarded.step(i)
    assert [line.step for line in guard.lines] == list(range(STEPS))
    assert [line.loss for line in guard.lines] == pytest.approx(losses, rel=1e-6)
    assert [line.norm for line in guard.lines] == pytest.approx(norms, rel=1e-4)
    rate = bare.optimizer.param_groups[0]["lr"]  # a tensor is not read: it may lie on a device
    assert [line.lr for line in guard.lines] == [pytest.approx(rate) if isinstance(rate, float) else None] * STEPS
    assert [line.time for line in guard.lines] == sorted(line.time for line in guard.lines)


@every_kind
@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("first", [0, 3])
def test_a_bad_step_is_stopped_before_the_weights(kind: str, fault: str, first: int) -> None:
    training = Training(kind, bad=(first,), fault=fault)
    with nbdebug.guard(training.model, training.optimizer, on_trip="raise") as guard:
        for i in range(first):
            training.step(i)
        before = training.kept()
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            training.step(first)
    assert not changed(before, training.kept())
    error = caught.value
    assert error.step == error.trip.step == first
    assert error.trip.reason in (fault, *(["parameter"] if training.closure else []))
    assert error.report is None
    assert guard.trips == [error.trip]
    assert guard.lines[-1].outcome == "tripped"
    assert hooks_of(training.model) == 0


@every_kind
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_skipped_step_is_as_if_it_had_been_left_out_by_hand(kind: str, fault: str) -> None:
    bad = (0, 2, 3)
    by_hand, guarded = Training(kind, bad, fault), Training(kind, bad, fault)
    torch.manual_seed(5)
    for i in range(STEPS):
        by_hand.left_out(i) if i in bad else by_hand.step(i)
    torch.manual_seed(5)
    with nbdebug.guard(guarded.model, guarded.optimizer, on_trip="skip") as guard:
        for i in range(STEPS):
            guarded.step(i)
    assert not changed(by_hand.kept(), guarded.kept())
    assert guard.skipped == len(bad) and guard.steps == STEPS
    assert [line.outcome for line in guard.lines] == ["skipped" if i in bad else "ok" for i in range(STEPS)]
    assert guard.active is False and guard.fault == ""


@every_kind
def test_the_place_is_named(kind: str) -> None:
    training = Training(kind, bad=(2,))
    with nbdebug.guard(training.model, training.optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(STEPS):
            training.step(i)
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.op, finding.where.phase) == ("nan/log-of-nonpositive", "log", "forward")
    assert finding.where.step == 2 and finding.where.file == inspect.getsourcefile(Training)
    assert "the line at fault" in finding.where.text or "torch.log(level)" in finding.where.text
    if kind.startswith(("Adam plain", "SGD plain")):
        assert finding.where.samples == (3,)


def test_gradients_of_the_users_are_left_alone_by_a_skip() -> None:
    """The step is dropped, not its gradients: the user may look at them."""
    training = Training("AdamW plain", bad=(1,))
    with nbdebug.guard(training.model, training.optimizer, on_trip="skip"):
        training.step(0)
        training.optimizer.zero_grad()
        training.loss(1).backward()
        gradients = [p.grad for p in training.model.parameters()]
        training.optimizer.step()
        assert all(p.grad is g for p, g in zip(training.model.parameters(), gradients))


def test_gradients_that_are_set_to_zero_and_not_to_none() -> None:
    by_hand, guarded = Training("SGD momentum", (1, 2)), Training("SGD momentum", (1, 2))
    for training in (by_hand, guarded):
        own = training.optimizer.zero_grad
        training.optimizer.zero_grad = lambda own=own: own(set_to_none=False)
    torch.manual_seed(5)
    for i in range(STEPS):
        by_hand.left_out(i) if i in (1, 2) else by_hand.step(i)
    torch.manual_seed(5)
    with nbdebug.guard(guarded.model, guarded.optimizer, on_trip="skip"):
        for i in range(STEPS):
            guarded.step(i)
    assert not changed(by_hand.kept(), guarded.kept())


def test_parameters_that_come_later() -> None:
    training = Training("AdamW plain", (3,), "gradient")
    frozen = list(training.model.frozen.parameters())
    with nbdebug.guard(training.model, training.optimizer, on_trip="raise") as guard:
        training.step(0)
        training.step(1)
        for p in frozen:
            p.requires_grad_()
        training.optimizer.add_param_group({"params": frozen, "lr": 0.5})
        training.step(2)
        assert all(p.grad is not None for p in frozen)
        before = training.kept()
        with pytest.raises(nbdebug.NonFiniteStep):
            training.step(3)
    assert not changed(before, training.kept()) and guard.fault == ""


def odd_parameters() -> list[torch.nn.Parameter]:
    """Half and double, complex, a scalar, an empty one, one that is not contiguous."""
    torch.manual_seed(0)
    made = [
        torch.randn(3, 2),
        torch.randn(4, dtype=torch.float64),
        torch.randn(2, dtype=torch.complex64),
        torch.tensor(0.5),
        torch.zeros(0),
        torch.randn(3, 4).t(),
        torch.randn(5).bfloat16(),
        torch.randn(2).half(),
    ]
    return [torch.nn.Parameter(t) for t in made]


@pytest.mark.parametrize("foreach", [False, True])
def test_odd_parameters_are_watched_too(foreach: bool) -> None:
    def train(parameters: list[torch.nn.Parameter], steps: int, spoil: int | None = None, **given) -> object:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=foreach)
        with nbdebug.guard(torch.nn.ParameterList(parameters), optimizer, **given) as guard:
            for i in range(steps):
                optimizer.zero_grad()
                loss = sum((p.abs().double().square() * (1 + i)).sum() for p in parameters)
                loss.backward()
                if i == spoil:
                    parameters[2].grad[1] = complex(0, float("inf"))
                optimizer.step()
        return guard

    bare, guarded = odd_parameters(), odd_parameters()
    optimizer = torch.optim.SGD(bare, lr=0.1, momentum=0.9, foreach=foreach)
    for i in range(4):
        optimizer.zero_grad()
        sum((p.abs().double().square() * (1 + i)).sum() for p in bare).backward()
        optimizer.step()
    assert train(guarded, 4).report().ok
    assert all(torch.equal(a, b) for a, b in zip(bare, guarded))
    before = [p.detach().clone() for p in guarded]
    with pytest.raises(nbdebug.NonFiniteStep) as caught:
        train(guarded, 1, spoil=0, on_trip="raise")
    assert caught.value.trip.reason == "gradient"
    assert all(torch.equal(a, b) for a, b in zip(before, guarded))


def test_large_but_finite_gradients_are_no_alarm() -> None:
    """Their norm does not fit in float32; each of them does."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-30)
    with nbdebug.guard(torch.nn.ParameterList([weight]), optimizer) as guard:
        for _ in range(3):
            optimizer.zero_grad()
            (weight * 1e25).sum().backward()
            optimizer.step()
    assert guard.report().ok and guard.steps == 3 and not guard.trips


def test_a_step_without_any_gradient_is_no_alarm() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with nbdebug.guard(torch.nn.ParameterList([weight]), optimizer, max_grad_norm=1.0) as guard:
        optimizer.step()
        optimizer.zero_grad()
        (weight * 0).sum().backward()
        optimizer.step()
    assert guard.report().ok and not guard.trips and torch.equal(weight.detach(), torch.ones(4))
