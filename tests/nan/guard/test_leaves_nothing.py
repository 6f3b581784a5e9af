"""What the guard leaves behind when it closes: nothing; and what it does not get in the way of while it is open."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import Training, changed
from tests.nan.leftovers import BEFORE, PATCHABLE, assert_nothing_is_left, global_hooks, hooks_of

KIND = ["AdamW plain", "AdamW fused", "SGD foreach", "LBFGS", "Adam closure"]


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def ours(model: nn.Module) -> list:
    """What of nbdebug's hangs on a model: hooks that do nothing may stay on a copy, but nothing that needs nbdebug."""
    held = [h for m in model.modules() for n, hooks in vars(m).items() if n.endswith("_hooks") for h in hooks.values()]
    names = [k for m in model.modules() for k in vars(m) if "nbdebug" in k]
    return [h for h in held if "nbdebug" in type(h).__module__ + getattr(h, "__module__", "")] + names


def hooks_on(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(v) for name, v in vars(optimizer).items() if name.endswith("_hooks"))


def assert_bare(training: Training, attributes: set[str]) -> None:
    assert_nothing_is_left()
    assert hooks_of(training.model) == 0 and hooks_on(training.optimizer) == 0
    assert set(vars(training.optimizer)) == attributes
    for module in training.model.modules():
        assert "forward" not in vars(module) and "__call__" not in vars(module)
    for p in training.model.parameters():
        assert not p._backward_hooks and not getattr(p, "_post_accumulate_grad_hooks", None)


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("how", ["close", "with", "trip", "skip", "error", "never used", "twice closed"])
def test_nothing_is_left(kind: str, how: str) -> None:
    training = Training(kind, bad=(2,))
    vars(training.optimizer).setdefault("_zero_grad_profile_name", "x")  # torch adds it where it finds none
    attributes = set(vars(training.optimizer))
    if how in ("close", "never used", "twice closed"):
        guard = nbdebug.guard(training.model, training.optimizer)
        assert guard.active is True
        for i in range(0 if how == "never used" else 2):
            training.step(i)
        guard.close()
        if how == "twice closed":
            guard.close()
    elif how == "error":
        with pytest.raises(KeyError, match="mine"), nbdebug.guard(training.model, training.optimizer) as guard:
            training.step(0)
            raise KeyError("mine")
    else:
        on_trip = "skip" if how == "skip" else "raise"
        try:
            with nbdebug.guard(training.model, training.optimizer, on_trip=on_trip) as guard:
                for i in range(4 if how != "with" else 2):
                    training.step(i)
        except nbdebug.NonFiniteStep:
            assert how == "trip"
    assert guard.active is False and guard.fault == ""
    attributes |= {k for k in vars(training.optimizer) if k == "_opt_called"}
    assert_bare(training, attributes)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("when", ["before", "forward", "loss", "backward", "hook", "optimizer"])
def test_the_users_exceptions_pass_unchanged_and_the_guard_stays_sound(error, when: str) -> None:
    training = Training("AdamW plain", bad=(4,))
    mine = error("mine")

    def interrupt(*given):
        raise mine

    def broken(i: int) -> None:
        handles = []
        if when == "before":
            raise mine
        if when == "forward":
            handles.append(training.model.head.register_forward_pre_hook(interrupt))
        try:
            loss = training.loss(i)
            if when == "loss":
                raise mine
            if when == "backward":
                loss.register_hook(interrupt)
            if when == "hook":
                handles.append(training.model.stem.weight.register_hook(interrupt))
            loss.backward()
            if when == "optimizer":
                handles.append(training.optimizer.register_step_post_hook(interrupt))
            training.optimizer.step()
        finally:
            for handle in handles:
                handle.remove()

    with nbdebug.guard(training.model, training.optimizer) as guard:
        training.step(0)
        with pytest.raises(error) as caught:
            broken(1)
        assert caught.value is mine and not getattr(mine, "__notes__", []) and mine.__cause__ is None
        assert guard.active and guard.fault == ""
        training.step(2)
        training.step(3)
        with pytest.raises(nbdebug.NonFiniteStep) as tripped:
            training.step(4)
    (finding,) = tripped.value.report.findings
    assert (finding.code, finding.where.samples) == ("nan/log-of-nonpositive", (3,))
    assert len(tripped.value.trip.inputs) == 1, "what the broken step began belongs to no step"
    assert_nothing_is_left()


def test_used_twice_one_after_the_other() -> None:
    training = Training("AdamW plain", bad=(3,))
    for _ in range(2):
        with nbdebug.guard(training.model, training.optimizer) as guard:
            training.step(0)
            training.step(1)
        assert guard.steps == 2
    with nbdebug.guard(training.model, training.optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in (2, 3):
            training.step(i)
    assert caught.value.step == 1 and caught.value.report.findings[0].where.samples == (3,)
    assert_nothing_is_left()


def test_two_guards_on_two_trainings_at_once() -> None:
    one, other = Training("AdamW plain", bad=(3,)), Training("SGD plain", bad=(5,))
    with nbdebug.guard(other.model, other.optimizer) as second:
        with nbdebug.guard(one.model, one.optimizer) as first:
            for i in range(3):
                one.step(i)
                other.step(i)
            with pytest.raises(nbdebug.NonFiniteStep) as caught:
                one.step(3)
            assert caught.value.trip in first.trips and not second.trips
            assert caught.value.report.findings[0].where.samples == (3,)
            assert second.active and second.steps == 3
        for i in range(3, 5):
            other.step(i)
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            other.step(5)
    assert caught.value.trip in second.trips and caught.value.step == 5
    assert caught.value.report.findings[0].where.samples == (3,)
    assert_nothing_is_left()
    assert hooks_of(one.model) == hooks_of(other.model) == hooks_on(one.optimizer) == hooks_on(other.optimizer) == 0


def test_guards_closed_in_the_order_in_which_they_were_made() -> None:
    """Not as a stack: the first goes while the second stays."""
    one, other = Training("AdamW plain"), Training("AdamW plain", bad=(1,))
    first = nbdebug.guard(one.model, one.optimizer)
    with contextlib.closing(first), nbdebug.guard(other.model, other.optimizer):
        one.step(0)
        other.step(0)
        one.loss(1)
        first.close()
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            other.step(1)
    assert caught.value.report.findings[0].code == "nan/log-of-nonpositive"
    assert_nothing_is_left()


def test_nested_on_the_same_training_is_refused_or_works() -> None:
    training = Training("AdamW plain", bad=(2,))
    with nbdebug.guard(training.model, training.optimizer, on_trip="raise"):
        training.step(0)
        try:
            inner = nbdebug.guard(training.model, training.optimizer, on_trip="raise")
        except (RuntimeError, ValueError) as error:
            assert "guard" in str(error)
        else:
            with contextlib.closing(inner):
                training.step(1)
                before = training.kept()
                with pytest.raises(nbdebug.NonFiniteStep):
                    training.step(2)
                assert not changed(before, training.kept())
    assert_nothing_is_left()
    assert hooks_of(training.model) == 0 == hooks_on(training.optimizer)


def test_a_tracer_inside_a_guard_and_a_guard_inside_a_tracer() -> None:
    training = Training("AdamW plain", bad=(2,))
    with nbdebug.guard(training.model, training.optimizer) as guard:
        training.step(0)
        report = nbdebug.nan_trace(lambda: training.step(1), model=training.model, optimizer=training.optimizer)
        assert report.ok
        assert guard.active and guard.fault == ""
    assert_nothing_is_left()


def test_a_deep_copy_of_a_guarded_model_is_free() -> None:
    training = Training("AdamW plain")
    with nbdebug.guard(training.model, training.optimizer) as guard:
        training.step(0)
        twin = copy.deepcopy(training.model)
        other = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
        for i in range(3):
            other.zero_grad()
            twin(training.inputs[i]).square().mean().backward()
            other.step()
        assert guard.steps == 1 and guard.fault == ""
        training.step(1)
        assert guard.steps == 2
    assert not ours(twin)
    twin(training.inputs[0])
    assert guard.steps == 2


def test_what_is_saved_while_guarded_knows_nothing_of_nbdebug() -> None:
    training = Training("AdamW plain")
    with nbdebug.guard(training.model, training.optimizer):
        training.step(0)
        for thing in (training.model, training.optimizer, training.model.state_dict(), training.optimizer.state_dict()):
            file = io.BytesIO()
            torch.save(thing, file)
            assert b"nbdebug" not in file.getvalue(), type(thing)
            file.seek(0)
            torch.load(file, weights_only=False)
            assert b"nbdebug" not in pickle.dumps(thing)
        copied = copy.deepcopy(training.optimizer)
        assert hooks_on(copied) == 0
        file = io.BytesIO()
        torch.save(training.model, file)
    file.seek(0)
    assert not ours(torch.load(file, weights_only=False))


def test_weights_that_are_loaded_while_guarded() -> None:
    training = Training("AdamW plain", bad=(3,))
    with nbdebug.guard(training.model, training.optimizer) as guard:
        training.step(0)
        saved = copy.deepcopy(training.model.state_dict()), copy.deepcopy(training.optimizer.state_dict())
        training.step(1)
        training.model.load_state_dict(saved[0])
        training.optimizer.load_state_dict(saved[1])
        training.step(2)
        before = training.kept()
        with pytest.raises(nbdebug.NonFiniteStep):
            training.step(3)
        assert not changed(before, training.kept())
    assert guard.fault == ""


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
}


@pytest.mark.parametrize("made_first", [False, True], ids=["guard first", "scheduler first"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler(name: str, made_first: bool) -> None:
    def train(training: Training, scheduler, steps: int = 8) -> list[float]:
        rates = []
        for i in range(steps):
            rates.append(training.optimizer.param_groups[0]["lr"])
            loss = training.step(i)
            scheduler.step(loss) if name == "ReduceLROnPlateau" else scheduler.step()
        return rates

    bare, guarded = Training("SGD momentum"), Training("SGD momentum")
    torch.manual_seed(3)
    rates = train(bare, SCHEDULERS[name](bare.optimizer))
    assert len(set(rates)) > 1
    torch.manual_seed(3)
    scheduler = SCHEDULERS[name](guarded.optimizer) if made_first else None
    with warnings.catch_warnings(), nbdebug.guard(guarded.model, guarded.optimizer) as guard:
        warnings.simplefilter("error")  # "Detected call of `lr_scheduler.step()` before `optimizer.step()`"
        train(guarded, scheduler or SCHEDULERS[name](guarded.optimizer))
    assert not changed(bare.kept(), guarded.kept())
    assert [line.lr for line in guard.lines] == pytest.approx(rates)
    guarded.step(9)  # the scheduler's own wrapper of `step` is still in place
    assert_nothing_is_left()


def test_hooks_of_the_users_own_stay_and_run() -> None:
    training, calls = Training("AdamW plain"), []
    handles = [
        training.optimizer.register_step_pre_hook(lambda *given: calls.append("before")),
        training.optimizer.register_step_post_hook(lambda *given: calls.append("after")),
        training.model.register_forward_hook(lambda *given: calls.append("forward")),
    ]
    with nbdebug.guard(training.model, training.optimizer):
        training.step(0)
    training.step(1)
    assert calls == ["forward", "before", "after"] * 2
    assert hooks_on(training.optimizer) == 2
    for handle in handles:
        handle.remove()


def test_a_pre_hook_of_the_users_that_changes_gradients_is_looked_at_too() -> None:
    """Registered before the guard or after it: what reaches the update is what counts."""
    for first in (True, False):
        training = Training("SGD plain")

        def spoil(optimizer, args, kwargs):
            optimizer.param_groups[0]["params"][0].grad[0, 0] = float("nan")

        handle = training.optimizer.register_step_pre_hook(spoil) if first else None
        with nbdebug.guard(training.model, training.optimizer, on_trip="raise"):
            handle = handle or training.optimizer.register_step_pre_hook(spoil)
            before = training.kept()
            if first:
                with pytest.raises(nbdebug.NonFiniteStep):
                    training.step(0)
                assert {k: v for k, v in before.items() if "model" in k} == {
                    k: v for k, v in training.kept().items() if "model" in k
                }
        handle.remove()


def test_nothing_is_patched_for_longer_than_it_is_open() -> None:
    for _ in range(3):
        training = Training("AdamW plain")
        guard = nbdebug.guard(training.model, training.optimizer)
        training.step(0)
        guard.close()
        assert {name: read() for name, read in PATCHABLE.items()} == BEFORE
        assert not any(global_hooks().values())


def test_a_model_in_several_parts() -> None:
    encoder, decoder = nn.Linear(4, 6), nn.Linear(6, 1)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()])
    x, scale = torch.randn(4, 5, 4), torch.ones(4, 5, 1)
    scale[2, 1] = 0
    with (
        nbdebug.guard({"encoder": encoder, "decoder": decoder}, optimizer),
        pytest.raises(nbdebug.NonFiniteStep) as caught,
    ):
        for i in range(4):
            optimizer.zero_grad()
            hidden = torch.log(encoder(x[i]).square() * scale[i])
            decoder(hidden).mean().backward()
            optimizer.step()
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.samples, finding.where.step) == ("nan/log-of-nonpositive", (1,), 2)
    assert_nothing_is_left()
