"""Each hand-written trap: named right in every part that it has, or passed over in silence."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

import nbdebug
from tests.nan.judge import answer_of
from tests.nan.traps import TRAPS, Trap


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ask(trap: Trap) -> nbdebug.Report | None:
    """The report, also where it comes with the user's own exception (None where such an exception carries none)."""
    made = trap.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if trap.raises is None:
            return nbdebug.nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=trap.steps)
        with pytest.raises(trap.raises) as caught:
            nbdebug.nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=trap.steps)
    report = getattr(caught.value, "report", None)
    if trap.truth is not None:
        assert report is not None, "the exception carries no report"
        notes = getattr(caught.value, "__notes__", [])
        assert any("nbdebug" in note or report.findings[0].code in note for note in notes) or sys.version_info < (3, 11)
    return report


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name: str):
    trap = TRAPS[name]
    report = ask(trap)
    answer = {"findings": 0} if report is None else answer_of(report)
    right = trap.judge(answer)
    assert all(right.values()), f"{right}\nexpected {trap.truth} in lines {sorted(trap.lines())}\ngot {answer}"
    if trap.note:
        assert any(trap.note in note.lower() for note in report.notes), report.notes


def test_there_are_traps_of_both_kinds():
    faulty = [trap for trap in TRAPS.values() if trap.truth is not None]
    assert len(TRAPS) >= 70 and len(faulty) >= 45 and len(TRAPS) - len(faulty) >= 25
    assert all(trap.lines() for trap in faulty if trap.truth.phase == ("forward",)), "a fault in the forward has a line"
