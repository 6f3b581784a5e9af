"""A guard's trip located, by this process."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from nbdebug.chapters.nan.guard.account import QUESTION, of_trip
from nbdebug.chapters.nan.guard.locate import locate, lost
from nbdebug.chapters.nan.guard.located_by_all import SHARDED, of_all, of_one
from nbdebug.chapters.nan.guard.parallel import alone, by_itself
from nbdebug.chapters.nan.guard.trip import Trip
from nbdebug.chapters.nan.guard.undo import Undo
from nbdebug.finding import Report
from nbdebug.subject import Subject


class Locator:
    """What `Trip.locate` calls: it has the guard's models, and the way to make a bad update again."""

    def __init__(self, guard: Any, undo: Undo | None):
        self.guard, self.undo = guard, undo

    def __call__(self, trip: Trip) -> Report:
        """By hand, at any time: this process runs its own batch again, and waits for no other."""
        ranks = self.guard.ranks
        report = self._told(trip, self._own(trip))
        return report if ranks is None or len(ranks.members) < 2 else of_one(trip, report, ranks.members)

    def with_the_others(self, trip: Trip) -> Report:
        """Where all processes have stopped the same step: each runs its own batch again, and hears of all."""
        ranks = self.guard.ranks
        if ranks is None or not ranks.promised:
            return self(trip)
        report = self._own(trip)
        everyone = ranks.share(dataclasses.replace(report, saver=None))
        return self._told(trip, of_all(trip, report, everyone, ranks))

    def failed(self, trip: Trip, fault: Exception) -> Report:
        """Where locating it came to a fault of our own."""
        return lost(trip, QUESTION, "", f"nbdebug failed ({type(fault).__name__}: {fault})")

    def _told(self, trip: Trip, report: Report) -> Report:
        report.notes, report.facts = (*self._notes(trip), *report.notes), {**report.facts, **of_trip(trip)}
        return report

    def _own(self, trip: Trip) -> Report:
        guard, subject = self.guard, str(Subject(self.guard.models, self.guard.optimizers, True))
        if guard.ranks is not None and guard.ranks.sharded:
            return lost(trip, QUESTION, subject, SHARDED)
        models = {name: alone(model) for name, model in guard.models.items()}
        guard.script.silent = True
        try:
            with by_itself(guard.models.values()) if guard.ranks is not None else contextlib.nullcontext():
                return locate(
                    trip,
                    models,
                    guard.optimizers,
                    run=guard.history.run(trip.step),
                    question=QUESTION,
                    subject=subject,
                    redo=None if self.undo is None else self.undo.redo,
                )
        finally:
            guard.script.silent = False
            if self.undo is not None:
                self.undo.restore()

    def _notes(self, trip: Trip) -> tuple[str, ...]:
        """What is worth knowing of the stop itself."""
        if not trip.late:
            return ()
        after = f"{trip.late} step{'s' * (trip.late > 1)} later"
        return (
            f"The device stopped it at once; the host heard of it {after}. What had begun by then changed nothing; "
            "a learning-rate schedule of yours may be ahead.",
        )
