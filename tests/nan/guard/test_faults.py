"""A fault of the guard's own never breaks the training: it is told once, everything is detached, the bits are the same.

Each function of the guard, found by walking its modules, is made to raise in turn: from the third step on, in a bad
step, and while it closes.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import nbdebug
from tests.nan.guard.kinds import Training, changed
from tests.nan.guard.planted import Planted, places, planted
from tests.nan.leftovers import assert_nothing_is_left, hooks_of

PLACES = places()
SHORT = [place.replace("nbdebug.chapters.nan.guard.", "").replace("nbdebug.", "") for place in PLACES]
KINDS = ["AdamW plain", "LBFGS"]
every_place = pytest.mark.parametrize("place", PLACES, ids=SHORT)


def bare(kind: str, bad: tuple[int, ...], steps: int) -> Training:
    training = Training(kind, bad)
    torch.manual_seed(5)
    for i in range(steps):
        training.step(i)
    return training


def hooks_on(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(v) for name, v in vars(optimizer).items() if name.endswith("_hooks"))


def detached(training: Training) -> None:
    assert_nothing_is_left()
    assert hooks_of(training.model) == 0 == hooks_on(training.optimizer)


def told_once(caught: list[warnings.WarningMessage]) -> None:
    ours = [w for w in caught if "nbdebug" in str(w.message)]
    assert len(ours) == 1 and issubclass(ours[0].category, RuntimeWarning), [str(w.message) for w in ours]
    assert "training" in str(ours[0].message), "says that the training goes on"


@every_place
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_healthy_run(place: str, kind: str) -> None:
    expected, training = bare(kind, (), 7), Training(kind)
    torch.manual_seed(5)
    with planted(place) as fault, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nbdebug.guard(training.model, training.optimizer, max_grad_norm=1e9) as guard:
            for i in range(7):
                fault.armed = i >= 2
                training.step(i)
            if fault.calls:
                assert not guard.active, "it watches no longer"
                detached(training)
            fault.armed = False
    assert not changed(expected.kept(), training.kept())
    detached(training)
    if fault.calls:
        told_once(caught)
        assert "planted in" in guard.fault and guard.report().ok
        assert "planted in" in " ".join([*guard.report().notes, *guard.report().unchecked]), "the report tells, too"
    else:
        assert guard.fault == "" and guard.steps == 7
        assert not [w for w in caught if "nbdebug" in str(w.message)]


def one_of_three(expected: Training, training: Training, before: dict, error: Exception | None, fault: str) -> None:
    """The step was stopped, or dropped, with all as before it; or the guard gave up and the run is a bare one."""
    if error is not None:
        assert not changed(before, training.kept())
        return
    went_on, dropped = changed(expected.kept(), training.kept()), changed(before, training.kept())
    assert not dropped or (fault and not went_on), f"fault {fault!r}; not as a bare run in {went_on[:3]}"


@every_place
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_trip", ["trace", "raise", "skip", "record"])
def test_in_a_bad_step(place: str, kind: str, on_trip: str, tmp_path) -> None:
    training, expected = Training(kind, (3,)), bare(kind, (3,), 4)
    record = {"record": tmp_path / "run.nbdebug"} if on_trip == "record" else {}
    torch.manual_seed(5)
    error: Exception | None = None
    with planted(place) as fault, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nbdebug.guard(training.model, training.optimizer, on_trip=on_trip, **record) as guard:
            for i in range(3):
                training.step(i)
            before, fault.armed = training.kept(), True
            try:
                training.step(3)
            except nbdebug.NonFiniteStep as tripped:
                error = tripped
            fault.armed = False
            one_of_three(expected, training, before, error, guard.fault)
    detached(training)
    assert not isinstance(error, Planted)
    ours = [w for w in caught if "nbdebug" in str(w.message)]
    assert len(ours) <= 1, [str(w.message) for w in ours]
    if not fault.calls:
        assert guard.fault == "" and (error is not None) == (on_trip in ("trace", "raise"))
    elif error is None and on_trip in ("trace", "raise"):
        assert guard.fault and ours, "the trip was lost and nobody was told"
    if error is not None and on_trip == "trace":
        assert error.report is not None and error.report.findings, "a report that says at least that a step was bad"


@every_place
def test_while_it_closes(place: str) -> None:
    training = Training("AdamW plain")
    with planted(place) as fault, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        guard = nbdebug.guard(training.model, training.optimizer)
        training.step(0)
        fault.armed = True
        guard.close()
        fault.armed = False
    detached(training)
    assert not guard.active


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@every_place
def test_an_interrupt_inside_the_guard_is_the_users(place: str, error: type[BaseException]) -> None:
    """Ctrl-C may fall anywhere: it passes, and nothing stays attached after the with-block."""
    training = Training("AdamW plain")
    with planted(place, error, once=True) as fault:
        try:
            with nbdebug.guard(training.model, training.optimizer):
                training.step(0)
                fault.armed = True
                training.step(1)
                fault.armed = False
        except error:
            assert fault.calls == 1
        else:
            assert fault.calls == 0, "the interrupt was swallowed"
    detached(training)


def test_there_is_something_to_plant_faults_in() -> None:
    assert len(PLACES) > 40 and any("_hook" in p or "before" in p for p in PLACES)
