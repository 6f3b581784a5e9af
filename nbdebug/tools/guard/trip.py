"""A step that a guard has stopped: what is known of it, and the exception that it raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nbdebug.interrupts import ShownAtUsersLine
from nbdebug.observe.tape import Tape
from nbdebug.report import Report
from nbdebug.tools.guard.record.step_lines import StepLine

REASONS = ("loss", "gradient", "parameter", "buffer")


@dataclasses.dataclass(repr=False)
class Trip:
    """A step that was not finite, and was stopped before it changed anything.

    step: 0-based. reason: what was seen not finite first, one of REASONS. loss, norm: of that step, None if not known.
    lines: the last steps in numbers, this one last. inputs: what the models were called with, (name, args, kwargs);
    references, no copies. tape: the remembered step, random numbers included. late: how many later steps had begun when
    it was noticed (their updates were dropped). rank: of this process; bad_ranks: those that were bad themselves.
    report: what `locate` found, None before. folder: where the record has it.
    """

    step: int
    reason: str
    loss: float | None
    norm: float | None
    lines: tuple[StepLine, ...]
    inputs: list[tuple[str, tuple, dict]]
    tape: Tape
    late: int = 0
    rank: int | None = None
    bad_ranks: tuple[int, ...] = ()
    report: Report | None = None
    folder: Any = None
    locator: Callable[[Trip], Report] | None = dataclasses.field(default=None, compare=False)

    def locate(self) -> Report:
        """Replay the step and name what first made the bad value. Weights and optimizer stay as they are."""
        if self.report is None:
            if self.locator is None:
                raise ValueError("This trip is over: its step can't be replayed any more.")
            self.report = self.locator(self)
        return self.report

    def sentence(self) -> str:
        """What happened, in one sentence."""
        what = {
            "loss": f"the loss is {_number(self.loss)}",
            "gradient": f"the gradient norm is {_number(self.norm)}",
            "parameter": "the update makes a parameter non-finite",
            "buffer": "a running statistic became non-finite",
        }[self.reason]
        if self.reason == "loss" and self.bad_ranks and self.rank not in self.bad_ranks:
            what = f"the loss of rank {self.bad_ranks[0]} is not finite"
        return f"In step {self.step} {what}"

    def __repr__(self) -> str:
        return f"<Trip: {self.sentence()}>"


class NonFiniteStep(ShownAtUsersLine, RuntimeError):
    """A step was not finite; the update was not made: weights, buffers and optimizer state are as before it.

    `trip` holds what is known of it; `report` the answer, where it was located; `step` the step's number, from 0.
    """

    def __init__(self, trip: Trip):
        self.trip, self.step = trip, trip.step
        super().__init__(_message(trip))

    @property
    def report(self) -> Report | None:
        return self.trip.report


def _message(trip: Trip) -> str:
    text = f"{trip.sentence()}. The update was not made: weights, buffers and optimizer state are as before it."
    if trip.report is not None and trip.report.findings:
        first = trip.report.findings[0]
        text += f" Cause: {first.title} [{first.code}]; the whole report is this exception's attribute `report`."
    else:
        text += " This exception's `trip.locate()` names the cause."
    return text + (f" It is written to {trip.folder}." if trip.folder else "")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
