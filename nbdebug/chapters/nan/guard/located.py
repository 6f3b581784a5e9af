"""A guard's trip located: alone, or by all processes together."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.chapters.nan.guard.account import QUESTION, of_trip
from nbdebug.chapters.nan.guard.locate import locate, lost
from nbdebug.chapters.nan.guard.ranks import alone
from nbdebug.chapters.nan.guard.trip import Trip
from nbdebug.chapters.nan.guard.undo import Undo
from nbdebug.finding import Report
from nbdebug.subject import Subject


class Locator:
    """What `Trip.locate` calls: it has the guard's models, and the way to make a bad update again."""

    def __init__(self, guard: Any, undo: Undo | None):
        self.guard, self.undo = guard, undo

    def __call__(self, trip: Trip) -> Report:
        report = self._own(trip)
        report.notes, report.facts = (*self._notes(trip), *report.notes), {**report.facts, **of_trip(trip)}
        return report if self.guard.ranks is None else self._of_all(trip, report)

    def _own(self, trip: Trip) -> Report:
        guard, subject = self.guard, str(Subject(self.guard.models, self.guard.optimizers, True))
        if guard.ranks is not None and guard.ranks.sharded:
            return lost(trip, QUESTION, subject, "its parameters are spread over processes, which a replay does not do")
        models = {name: alone(model) for name, model in guard.models.items()}
        guard.script.silent = True
        try:
            return locate(trip, models, guard.optimizers, run=guard.history.run(trip.step), question=QUESTION,
                          subject=subject, redo=None if self.undo is None else self.undo.redo)
        finally:
            guard.script.silent = False
            if self.undo is not None:
                self.undo.restore()

    def _notes(self, trip: Trip) -> tuple[str, ...]:
        """What is worth knowing of the stop itself."""
        if not trip.late:
            return ()
        after = f"{trip.late} step{'s' * (trip.late > 1)} later"
        return (f"The device stopped it at once; the host heard of it {after}. What had begun by then changed nothing; "
                "a learning-rate schedule of yours may be ahead.",)

    def _of_all(self, trip: Trip, report: Report) -> Report:
        """Every process has replayed its own batch: those where it went bad are the ones to blame."""
        ranks = self.guard.ranks
        lost_here = report.findings[0].code == "nan/not-located"
        everyone = ranks.share(None if lost_here else report.findings[0])
        bad = tuple(rank for rank, finding in enumerate(everyone) if finding is not None)
        trip.bad_ranks = trip.bad_ranks or bad
        first = min(bad or trip.bad_ranks or (ranks.rank,))
        note = f"Of {ranks.world} processes, rank {first} was bad first" + (
            f" (bad: {', '.join(map(str, bad))})." if len(bad) > 1 else "; the others were finite by themselves."
            if bad else ".")
        findings = report.findings
        if lost_here and everyone[first] is not None:
            findings = (everyone[first],)
        findings = tuple(dataclasses.replace(f, where=dataclasses.replace(f.where, rank=first)) for f in findings)
        return dataclasses.replace(report, findings=findings, notes=(note, *report.notes))
