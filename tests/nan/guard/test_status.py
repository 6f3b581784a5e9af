"""What a guard says of itself: the headline, what was done to how many steps, the last steps, and no false calm."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import nbdebug
from tests.nan.guard.kinds import Training
from tests.nan.leftovers import assert_nothing_is_left

ON: list[Any] = []


@pytest.fixture(autouse=True)
def closed():
    yield
    while ON:
        ON.pop().close()
    assert_nothing_is_left()


def trained(steps: int, bad: tuple[int, ...] = (), **options: Any) -> Any:
    """A guard, still on, that has watched so many steps of a small model; bad ones have a logarithm of zero."""
    training = Training("AdamW plain", bad)
    guard = nbdebug.guard(training.model, training.optimizer, **options)
    ON.append(guard)
    for i in range(steps):
        with contextlib.suppress(nbdebug.NonFiniteStep):
            training.step(i)
    return guard


def headline(guard) -> str:
    return str(guard).splitlines()[0].split("  ")[0]


def test_a_guard_that_stopped_nothing_says_how_many_steps_it_watched() -> None:
    guard = trained(0)
    assert headline(guard) == "No step has been watched yet."
    guard.close()
    assert headline(guard) == "No step was watched."
    guard = trained(12)
    assert headline(guard).startswith("12 steps watched, none stopped. The loss went from ")
    assert "still watching" in str(guard) and "NonFiniteStep" in str(guard)
    guard.close()
    assert headline(guard).startswith("12 steps watched, none stopped. ") and "still watching" not in str(guard)
    assert guard.report().ok and "Nothing was found" not in str(guard)


def test_a_stopped_step_heads_its_report_and_says_that_the_weights_are_sound(capsys) -> None:
    guard = trained(6, bad=(2, 4))
    assert headline(guard) == "2 of 6 steps stopped, the last of them step 4."
    shown = capsys.readouterr().err
    assert shown.startswith("Step 2 was stopped: weights, buffers and optimizer state are as before it.\n")
    told = str(guard.trips[0].report.full())
    assert "not finite, stopped" in told and "The last 3 steps" in told
    assert "The last 6 steps" in str(guard.report().full())
    assert headline(trained(3, bad=(2,))) == "1 of 3 steps stopped: step 2."


def test_a_cause_that_nobody_looked_for_is_no_silence() -> None:
    guard = trained(4, bad=(3,), on_trip="raise")
    report = guard.report()
    assert not report.ok and [finding.code for finding in report] == ["nan/not-located"]
    assert "has not been searched for yet" in str(report) and "guard.trips[-1].locate()" in str(report)
    guard.trips[-1].locate()
    assert [finding.code for finding in guard.report()] == ["nan/log-of-nonpositive"]


def test_the_last_cause_that_is_known_is_told_where_later_ones_were_only_counted(tmp_path) -> None:
    guard = trained(12, bad=(1, 3, 5, 7, 9), on_trip="record", record=tmp_path / "run.nbdebug")
    report = guard.report()
    guard.close()
    assert headline(guard).startswith("5 of 12 steps dropped as not finite")
    assert [finding.code for finding in report] == ["nan/log-of-nonpositive"] and report.findings[0].where.step == 5


def test_skipped_steps_are_counted_and_are_no_finding() -> None:
    guard = trained(8, bad=(2, 5), on_trip="skip")
    report = guard.report()
    assert not report.findings and report.verdict == "not well, no cause known"
    assert headline(guard).startswith("2 of 8 steps dropped as not finite")
    assert any("2 of 8 steps (25%) were skipped" in note for note in guard.report().notes)
    guard = trained(5, skip_above=1e-12)
    assert headline(guard).startswith("5 steps watched, none stopped; 5 dropped for their norm.")


@pytest.mark.parametrize(("limit", "said"), [(1e-4, True), (1e4, False)])
def test_clipping_most_steps_is_told_first(limit: float, said: bool) -> None:
    notes = trained(12, max_grad_norm=limit).report().notes
    assert notes[0].startswith("More than half of the steps were clipped: the learning rate is too high") == said
    share = (
        "12 of 12 steps (100%) were clipped to a norm of 0.0001."
        if said
        else ("0 of 12 steps (0%) were clipped to a norm of 10000.")
    )
    assert share in notes
    few = trained(4, max_grad_norm=1e-4).report().notes
    assert not any("learning rate" in note for note in few), "four steps say nothing"


def test_a_fault_of_the_guards_own_is_said_first() -> None:
    guard = trained(3)
    with pytest.warns(RuntimeWarning, match="fault of its own"):
        guard.disable(ValueError("broken"))
    assert headline(guard).startswith("The guard stopped watching after 3 steps, because of a fault of its own.")
    assert "ValueError: broken" in " ".join(guard.report().unchecked)


def test_the_numbers_of_the_last_steps_are_in_the_report() -> None:
    guard = trained(5, keep=3)
    (table,) = guard.report().tables
    assert [row[0] for row in table.rows] == [2, 3, 4] and table.title == "The last 3 steps"
    assert table.title in str(guard.report().full())
    assert table.rows[-1][1] == guard.lines[-1].loss and torch.isfinite(torch.tensor(table.rows[-1][2]))
