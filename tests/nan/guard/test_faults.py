"""A fault of the guard's own never breaks the training: it is told once, everything is detached, the bits are the same.

Each function of the guard, found by walking its modules, is made to raise in turn, from the third step on. That step
and the next are healthy, the fifth is bad. (A guard that has had a fault leaves when the next step begins.)
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

import nbdebug
from nbdebug.observe.backward import EngineWatch
from nbdebug.observe.modules import WrapperWatch
from tests.nan.guard.kinds import Training, changed
from tests.nan.guard.planted import places, planted
from tests.nan.guard.ranks_faults import CHOSEN, IN_A_TRIP
from tests.nan.leftovers import BEFORE, assert_nothing_is_left, hooks_of

PLACES = places()
SHORT = [place.replace("nbdebug.tools.guard.", "").replace("nbdebug.", "") for place in PLACES]
every_place = pytest.mark.parametrize("place", PLACES, ids=SHORT)
ARMED, BAD = 2, 4  # steps


def hooks_on(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(v) for name, v in vars(optimizer).items() if name.endswith("_hooks"))


def detached(training: Training) -> None:
    assert_nothing_is_left()
    assert hooks_of(training.model) == 0 == hooks_on(training.optimizer)


def bare(kind: str) -> list[dict]:
    """What a run without a guard keeps after each step."""
    training, found = Training(kind, (BAD,)), []
    torch.manual_seed(5)
    for i in range(BAD + 1):
        training.step(i)
        found.append(training.kept())
    return found


EXPECTED = {kind: bare(kind) for kind in ("AdamW plain", "LBFGS")}


@contextlib.contextmanager
def guarded(training: Training, **given: object) -> Iterator[nbdebug.tools.guard.guard.Guard]:
    """A guard that is gone afterwards, whatever was wrong with it: one failure must not become many."""
    guard = nbdebug.guard(training.model, training.optimizer, **given)
    try:
        yield guard
    finally:
        with contextlib.suppress(Exception):
            guard._detach()
        while _get_current_dispatch_mode_stack():
            _pop_mode()
        for module in (torch.autograd, torch.autograd.graph):
            module._engine_run_backward = BEFORE["run_backward"]
        for watch in (EngineWatch, WrapperWatch):
            watch._attached.clear()
        EngineWatch._wrapped.clear()


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    ours = [w for w in caught if "nbdebug" in str(w.message)]
    assert all(issubclass(w.category, RuntimeWarning) for w in ours)
    return [str(w.message) for w in ours]


@every_place
@pytest.mark.parametrize(("kind", "on_trip"), [("AdamW plain", "trace"), ("AdamW plain", "skip"), ("LBFGS", "raise")])
def test_a_fault(place: str, kind: str, on_trip: str) -> None:
    training, error = Training(kind, (BAD,)), None
    torch.manual_seed(5)
    with (
        planted(place) as fault,
        warnings.catch_warnings(record=True) as caught,
        guarded(training, on_trip=on_trip, max_grad_norm=1e9) as guard,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("always")
        for i in range(BAD):
            fault.armed = i >= ARMED
            training.step(i)
        assert not changed(EXPECTED[kind][BAD - 1], training.kept()), "a healthy step came out otherwise"
        if guard.fault:
            fault.armed = False
            detached(training)
        else:
            assert not fault.calls, "a fault went by in silence"
            before = training.kept()
            try:
                training.step(BAD)
            except nbdebug.NonFiniteStep as tripped:
                error = tripped
            fault.armed = False
            moved, fails = changed(before, training.kept()), changed(EXPECTED[kind][BAD], training.kept())
            assert not moved or guard.fault and (not fails or all("norm.running" in n or "num_b" in n for n in moved))
            assert (error is not None) or on_trip == "skip" or guard.fault, "the trip was lost and nobody was told"
        guard.close()
    detached(training)
    report = None if error is None else error.report
    # a trial of a fix that fails costs that fix alone, and it says so
    lost = report is not None and report.findings[0].code == "nan/not-located" and "nbdebug failed" in str(report)
    assert len(told(caught)) == bool(guard.fault or lost), told(caught)
    if guard.fault:
        assert "planted in" in guard.fault and "training" in told(caught)[0]
        report = guard.report()
        assert "planted in" in " ".join([*report.notes, *report.unchecked]), "the report tells, too"
    if error is not None and on_trip == "trace":
        assert error.report is not None and error.report.findings, "a report that says at least that a step was bad"


@every_place
def test_a_fault_while_it_closes(place: str) -> None:
    training = Training("AdamW plain")
    with planted(place) as fault, warnings.catch_warnings(record=True) as caught, guarded(training) as guard:
        warnings.simplefilter("always")
        training.step(0)
        fault.armed = True
        guard.close()
        fault.armed = False
        detached(training)
    assert not guard.active and len(told(caught)) == bool(fault.calls)


@every_place
def test_an_interrupt_inside_the_guard_is_the_users(place: str) -> None:
    """Ctrl-C may fall anywhere: it passes, and nothing stays attached after the with-block."""
    training = Training("AdamW plain")
    with planted(place, KeyboardInterrupt, once=True) as fault, guarded(training) as guard:
        try:
            with guard:
                training.step(0)
                fault.armed = True
                training.step(1)
                fault.armed = False
        except KeyboardInterrupt:
            assert fault.calls == 1
        else:
            assert fault.calls == 0, "the interrupt was swallowed"
        detached(training)


def test_there_is_something_to_plant_faults_in() -> None:
    assert len(PLACES) > 80 and any(place.endswith("StepTracker.before_update") for place in PLACES)
    for place in CHOSEN + IN_A_TRIP:  # with several processes they are asked with all tests alone
        with planted(place):
            pass
