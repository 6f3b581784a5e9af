"""The report of several ranks: one sentence, who was in which call, and the stack of each rank."""

from __future__ import annotations

from nbdebug.report import Report, Symptom, Table
from nbdebug.text import count, figures
from nbdebug.tools.distributed.facts import RanksFacts
from nbdebug.tools.distributed.rules import name_cause


def report_of(facts: RanksFacts, question: str, seconds: float = 0.0, status: int | None = 0) -> Report:
    """seconds: from the start to the verdict; status: of the launcher, None where it had to be ended."""
    found = name_cause(facts)
    failed = found is None and status not in (0, None)
    symptoms = [Symptom(f"The launcher ended with status {status}.", "Its output above tells more.")] if failed else []
    if found is None and status is None:
        symptoms = [Symptom("The ranks did not end within the limit, and all are in the same call.")]
    calls = sum(len(own) for log in facts.ranks.values() for own in log.calls.values())
    steps = max((len(log.events.get("loss", ())) for log in facts.ranks.values()), default=0)
    return Report(
        question,
        (found,) if found is not None else (),
        subject=f"{count(len(facts.ranks), 'rank')}, {count(calls, 'collective')} compared",
        facts={"ranks": {rank: len(log.trail) for rank, log in facts.ranks.items()}, "seconds": round(seconds, 2)},
        headline="" if found is not None or symptoms else "All ranks made the same calls, and nothing differs that should be the same.",
        symptoms=tuple(symptoms),
        notes=(f"The verdict came {figures(seconds)} s after the start.",) if seconds and found is not None else (),
        steps=steps or int(bool(calls)),
        tables=tuple(table for table in (state(facts), stacks(facts)) if table.rows),
    )


def state(facts: RanksFacts) -> Table:
    """The last call of each rank."""
    rows = []
    for rank, log in sorted(facts.ranks.items()):
        line = log.last.lines[0] if log.last and log.last.lines else None
        place = f"{line[0].rpartition('/')[2]}, line {line[1]}" if line else ""
        error = log.one("error")
        ended = f"{error['type']}" if error else "ended" if log.one("end") else "running"
        rows.append([rank, sum(map(len, log.calls.values())), str(log.last or "none"), place, ended])
    return Table("The last call of each rank", ("rank", "calls", "last call", "line", "state"), rows, open=True)


def stacks(facts: RanksFacts) -> Table:
    rows = []
    for rank, log in sorted(facts.ranks.items()):
        event = log.one("stack")
        rows += [[rank, line] for line in (event["stack"] if event else ())]
    return Table("Where each rank stood", ("rank", "frame"), rows, "the main thread, its last 12 frames", open=False)
