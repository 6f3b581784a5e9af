"""What all processes found of the same step, in one report: which of them was bad first, and where.

In DDP a bad batch of one process makes the gradients of all bad. So each runs its own batch again by itself: the one
that is bad then is to blame. What is born in the forward comes before what is born in the backward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.chapters.nan.guard.locate import FINITE
from nbdebug.chapters.nan.guard.trip import Trip
from nbdebug.finding import PHASES, Finding, Report

SHARDED = "its parameters are spread over processes, so that none can run it again by itself"


def located(report: Report) -> bool:
    """Whether a report names a place."""
    return report.findings[0].code != "nan/not-located"


def finite(report: Report) -> bool:
    """Whether a process has run its batch again, and found nothing."""
    return not located(report) and report.findings[0].title.endswith(FINITE)


def of_all(trip: Trip, own: Report, everyone: list[Report | None], ranks: Any) -> Report:
    """This process's report, with what the others found. everyone: by the members of the run; None has no answer."""
    told = {rank: report for rank, report in zip(ranks.members, everyone, strict=True) if report is not None}
    told[ranks.rank] = own
    places = [rank for rank, report in told.items() if located(report)]
    by_loss = [rank for rank in trip.bad_ranks if not places or rank not in told or not finite(told[rank])]

    def when(rank: int) -> tuple:
        phase = told[rank].findings[0].where.phase if rank in told else None
        return rank not in by_loss, PHASES.index(phase) if phase in PHASES else len(PHASES), rank

    places.sort(key=when)
    bad = sorted({*by_loss, *places}, key=when)
    leading = (places or bad or [ranks.rank])[0]
    base = told.get(leading, own)
    findings = _of_rank(base.findings, leading if bad else None)
    for rank in places[1:]:
        findings += tuple(f for f in _of_rank(told[rank].findings, rank) if _cause(f) not in map(_cause, findings))
    note = _who(bad, len(ranks.members), bool(by_loss)) if bad else _nobody(told, ranks)
    if caught := [rank for rank in trip.bad_ranks if rank not in bad]:
        note += f" Rank {_listed(caught)} took it over (from statistics of all batches, say): finite by itself."
    trip.bad_ranks = tuple(sorted(bad))
    return dataclasses.replace(
        base,
        subject=own.subject,
        findings=findings,
        notes=(note, *base.notes),
        saver=own.saver if base is own else None,
    )


def of_one(trip: Trip, own: Report, members: tuple[int, ...]) -> Report:
    """This process's report, where the others are not asked."""
    by_loss, here = trip.bad_ranks, located(own)
    if here:
        trip.bad_ranks = tuple(sorted({*by_loss, trip.rank}))  # type: ignore[arg-type]
        note = f"This is what rank {trip.rank} found in its own batch."
    elif by_loss:
        note = _who(list(by_loss), len(members), True) + " Call `trip.locate()` there: it names the place."
    else:
        note = (
            f"Rank {trip.rank} alone names no place: in a run of {len(members)} processes what is not finite may "
            "have come with the gradients of another. Call `trip.locate()` in each of them."
        )
    rank = trip.rank if here else by_loss[0] if by_loss else None
    return dataclasses.replace(own, findings=_of_rank(own.findings, rank), notes=(note, *own.notes))


def _of_rank(findings: tuple[Finding, ...], rank: int | None) -> tuple[Finding, ...]:
    return tuple(dataclasses.replace(f, where=dataclasses.replace(f.where, rank=rank)) for f in findings)


def _cause(finding: Finding) -> tuple:
    where = finding.where
    return finding.code, where.module, where.op, where.file, where.line


def _who(bad: list[int], processes: int, by_loss: bool) -> str:
    """Which process was bad first; `bad` has it first."""
    first = f"Of {processes} processes, rank {bad[0]} was bad first"
    if len(bad) > 1:
        return f"{first}; bad by themselves in the same step: ranks {_listed(sorted(bad))}."
    return f"{first}: its own loss was not finite." if by_loss else f"{first}: the others were finite by themselves."


def _nobody(told: dict[int, Report], ranks: Any) -> str:
    """Why no process is to blame."""
    if ranks.sharded:
        return (
            "Which process was bad first is not known: every loss was finite, and gradients are summed over all "
            "processes before anyone sees them."
        )
    unknown = [rank for rank in ranks.members if rank not in told or not finite(told[rank])]
    if unknown:
        return f"Which process was bad first is not known: rank {_listed(unknown)} could not run its batch again."
    return (
        f"Each of {len(ranks.members)} processes is finite when it runs its own batch again by itself: the fault "
        "is in what they do together (gradients that overflow when they are summed, statistics of all batches), or "
        "the step does not repeat."
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + " and " * (len(ranks) > 1) + str(ranks[-1])
